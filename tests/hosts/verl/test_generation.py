"""Operations of the rollout program on servers and workers that answer like verl's."""

from __future__ import annotations

import asyncio
import math
import threading
from types import SimpleNamespace

import pytest
import torch
from verl_tensors import PROFILE

import rlx_plugins as rlx
from rlx_plugins.core.config import build
from rlx_plugins.hosts.verl.generation import Engine, components, policy_forward, scored_row

EOS = 9
PROGRAM = rlx.HostProfile(
    "verl",
    PROFILE.signals | {"rollout"},
    frozenset("rounds until_group pause continue context row_temperature abort forward:logp choose_prompts".split()),
)


class Server:
    """Answers with the prompt's first token again and again; responses end after `ends[prompt]` tokens of their own."""

    def __init__(self, ends, delay=None):
        self.ends, self.delay, self.requests = ends, delay or {}, []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        self.requests.append((list(prompt_ids), dict(sampling_params)))
        await asyncio.sleep(self.delay.get(prompt_ids[0], 0))
        own = sum(t == prompt_ids[0] for t in prompt_ids) - 1
        left = self.ends[prompt_ids[0]] - own
        n = min(left, sampling_params["max_tokens"])
        tokens = [prompt_ids[0]] * n + ([EOS] if n < sampling_params["max_tokens"] else [])
        return SimpleNamespace(token_ids=tokens, log_probs=[-0.5] * len(tokens), extra_fields={"global_steps": 2})


class RewardWorker:
    """Scores a response with its length; remembers what it was handed."""

    def __init__(self):
        self.rows = []
        self.compute_score = SimpleNamespace(remote=self._score)

    async def _score(self, data):
        self.rows.append(data)
        n = int(data.batch["responses"].shape[1])
        return {"reward_score": float(n), "reward_extra_info": {"score": float(n), "short": 1.0 - n}}


def engine(server, worker=None, **options):
    rows = {"p": {"raw_prompt": [{"role": "user", "content": "?"}], "data_source": "x", "extra_info": {"a": 1}}}
    return Engine(
        server,
        [worker or RewardWorker()],
        lambda key: rows["p"],
        lambda given: [(torch.arange(len(p + t)) * 0.1, torch.ones(len(p + t))) for p, t in given],
        lambda given: [torch.tensor(row[-2:]) for row in given],
        sampling={"temperature": 1.0, "logprobs": True},
        version=2,
        eos=[EOS],
        **options,
    )


def group(prompt, n=1, max_tokens=6):
    g = rlx.Group(f"g{prompt}", "p", [prompt, 5], max_tokens)
    g.start(n)
    return g


def test_a_banned_token_is_banned_in_a_request_of_its_own_whose_log_prob_is_unknown():
    server, g = Server({1: 5}), group(1)
    (row,) = g.rollouts
    row.banned = [7, 8]
    engine(server).execute(rlx.Generate([row], until="all"))
    first, second = (params for _, params in server.requests)
    assert (first["max_tokens"], first["logit_bias"]) == (1, {7: -100.0, 8: -100.0})
    assert second["max_tokens"] == 5 and "logit_bias" not in second
    (segment,) = row.segments
    assert segment.tokens == [1, 1, 1, 1, 1, EOS] and math.isnan(segment.logp[0]) and segment.logp[1:] == [-0.5] * 5
    assert row.banned == []


def test_a_request_carries_its_rows_own_seed_when_asked_to():
    def seeds(order, seed):
        server, rows = Server({1: 50}), group(1, n=3).rollouts
        engine(server, chunk=3, seed=seed).execute(rlx.Generate([rows[i] for i in order], until="all"))
        return sorted(str(params.get("seed")) for _, params in server.requests)

    drawn = seeds([0, 1, 2], 7)
    assert len(set(drawn)) == len(drawn) == 6  # three rows, two chunks each
    assert seeds([2, 0, 1], 7) == drawn and not set(seeds([0, 1, 2], 8)) & set(drawn)
    assert set(seeds([0, 1, 2], None)) == {"None"}


def test_rows_finish_by_end_of_sequence_or_length_and_come_back_scored():
    short, long = group(1), group(2)
    worker = RewardWorker()
    engine(Server({1: 3, 2: 50}), worker).execute(rlx.Generate(short.rollouts + long.rollouts, until="all"))
    a, b = short.rollouts[0], long.rollouts[0]
    assert (a.tokens, a.stop, a.state) == ([1, 1, 1, EOS], "eos", "finished")
    assert (b.tokens, b.stop, b.state) == ([2] * 6, "length", "finished")
    assert a.reward == 4.0 and a.components == {"short": -3.0}
    assert a.segments[0].logp == [-0.5] * 4 and a.segments[0].version == 2
    row = worker.rows[0]
    assert row.batch["prompts"].tolist() == [[1, 5]] and row.non_tensor_batch["data_source"].tolist() == ["x"]
    assert row.non_tensor_batch["extra_info"][0] == {"a": 1}


def test_until_group_returns_while_another_group_is_under_way():
    fast, slow = group(1), group(2)
    e = engine(Server({1: 1, 2: 1}, delay={2: 0.3}))
    e.execute(rlx.Generate(fast.rollouts + slow.rollouts, until="group"))
    assert fast.rollouts[0].state == "finished" and slow.rollouts[0].state == "running"
    e.execute(rlx.Generate(slow.rollouts, until="group"))
    assert (
        slow.rollouts[0].state == "finished" and len(e.client.requests) == 2
    )  # the request under way was not sent again


def test_a_pause_hands_the_row_back_and_it_goes_on_from_its_tokens():
    g = group(1)
    (r,) = g.rollouts
    r.pause_at = 2
    server = Server({1: 4})
    e = engine(server)
    e.execute(rlx.Generate([r]))
    assert (r.state, r.tokens) == ("paused", [1, 1])
    r.pause_at = None
    e.execute(rlx.Generate([r]))
    assert r.tokens == [1, 1, 1, 1, EOS] and len(r.segments) == 1 and server.requests[1][0] == [1, 5, 1, 1]


def test_chunks_bound_what_an_abort_waits_for_and_partial_tokens_stay():
    g = group(1, max_tokens=100)
    (r,) = g.rollouts
    other = group(2)
    e = engine(Server({1: 80, 2: 1}, delay={1: 0.05}), chunk=10)
    e.execute(rlx.Generate([r, *other.rollouts], until="group"))
    assert r.state == "running"
    e.execute(rlx.Abort([r]))
    assert (r.state, r.stop, r.reward) == ("parked", "aborted", None)
    assert 0 < len(r) <= 20 and not e.under_way
    r.state = "new"
    e.execute(rlx.Generate([r]))
    assert len(r) == 81 and r.state == "finished"


def test_context_and_temperature_are_the_rollouts_own():
    g = group(1)
    (r,) = g.rollouts
    r.context, r.temperature = [7, 7], 0.3
    server = Server({1: 1})
    engine(server, own_temperatures=True).execute(rlx.Generate([r]))
    prompt, sampling = server.requests[0]
    assert prompt == [1, 5, 7, 7] and sampling["temperature"] == 0.3 and sampling["max_tokens"] == 6


def test_forward_scores_response_tokens_and_prompts():
    g = group(1)
    (r,) = g.rollouts
    r.segments.append(rlx.Segment([4, 4, 4]))
    e = engine(Server({}))
    assert e.execute(rlx.Forward([r], "logp"))[0] == pytest.approx([0.1, 0.2, 0.3])
    assert e.execute(rlx.Forward([r], "entropy"))[0] == [1.0, 1.0, 1.0]
    assert e.execute(rlx.Forward([r], "prompt_entropy")) == [1.0]
    assert e.execute(rlx.Forward([r], "hidden"))[0].tolist() == [4, 4]
    r.segments, r.context = [], [8]
    assert e.execute(rlx.Forward([r], "hidden"))[0].tolist() == [5, 8]  # nothing generated yet: the prompt's last token


def test_a_failing_reward_function_stops_the_step():
    async def broken(data):
        raise ValueError("no answer")

    worker = SimpleNamespace(compute_score=SimpleNamespace(remote=broken))
    with pytest.raises(ValueError, match="no answer"):
        engine(Server({1: 1}), worker).execute(rlx.Generate(group(1).rollouts))


def test_a_whole_program_with_rounds_and_a_hint_runs():
    chosen = build({"hint": {"name": "guide", "success_threshold": 100.0, "k_guided": 2}}, PROGRAM)
    columns = {"hint": [7]}
    ctx = rlx.Context(
        step=0, total_steps=1, groups=2, group_size=2, max_tokens=4, prompts={"p": [1, 5]}, offered=["p", "p"],
        columns=lambda key: columns,
    )  # fmt: skip
    server = Server({1: 2})
    groups = rlx.drive(rlx.rollout_program(chosen, ctx), engine(server).execute)
    assert [len(g.rollouts) for g in groups] == [4, 4]
    assert [r.helped for r in groups[0].rollouts] == [False, False, True, True]
    hinted = [prompt for prompt, _ in server.requests if 7 in prompt]
    assert len(hinted) == 4 and threading.active_count() > 1


def test_components_can_be_named():
    assert components({"score": 1.0, "a": True, "b": "text", "c": 2}, None) == {"a": 1.0, "c": 2.0}
    assert components({"score": 1.0, "a": True, "c": 2}, None, ["c"]) == {"a": 1.0}
    with pytest.raises(rlx.DataError, match="'x', but the reward function returned a"):
        components({"a": 1.0}, ["x"])


def test_a_scored_row_has_verls_form():
    row = scored_row({"data_source": "x", "dummy_tensor": torch.zeros(1)}, [1, 2], [3])
    assert row.batch["input_ids"].tolist() == [[1, 2, 3]] and row.batch["position_ids"].tolist() == [[0, 1, 2]]
    assert "dummy_tensor" not in row.non_tensor_batch and row.non_tensor_batch["response_len"].tolist() == [1]


def test_policy_forward_pads_to_what_the_workers_need_and_cuts_it_off():
    seen = []

    class Workers:
        def compute_log_prob(self, data):
            seen.append(data)
            sizes = data["input_ids"].offsets().diff().tolist()
            made = [torch.arange(n).float() for n in sizes]
            nested = torch.nested.as_nested_tensor(made, layout=torch.jagged)
            return {"log_probs": nested, "entropy": nested}

    out = policy_forward(Workers(), [([1, 2], [3]), ([4], [])], temperature=1.0, multiple=4)
    assert len(seen[0]) == 4 and [len(a) for a, _ in out] == [3, 1]
