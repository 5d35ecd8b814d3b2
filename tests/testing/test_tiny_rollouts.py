"""Rollout code of the tiny tasks: an engine unlike the trainer, mixed sources, an agent of several turns."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

import torch

from rlx_plugins.testing.tiny_agent import AGENT_SIGNALS, stepwise_agent, working_values
from rlx_plugins.testing.tiny_engine import TinyPolicy, fp8_engine, mixed_sources
from rlx_plugins.testing.tiny_model import build_tiny_model, build_tiny_tokenizer

PROMPTS = [[{"role": "user", "content": text}] for text in ("3+8-5=", "3+8-5=", "7-9+2+4=", "7-9+2+4=")]


@pytest.fixture(scope="module")
def trainer():
    tokenizer = build_tiny_tokenizer()
    model = build_tiny_model(tokenizer, hidden_size=32, layers=2, intermediate_size=64, heads=2)
    return SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(unwrap_model=lambda m: m),
        processing_class=tokenizer,
        temperature=0.7,
        max_completion_length=6,
        num_generations=2,
    )


@pytest.fixture
def scripted(monkeypatch):
    """Puts answers in the policy's mouth: `say(texts...)` for each call of `sample`, one text per row."""
    queue = []

    def sample(self, rows, max_new):
        texts = queue.pop(0)
        assert len(texts) == len(rows)
        return [(self.tokens(text), [-0.5] * len(self.tokens(text))) for text in texts]

    monkeypatch.setattr(TinyPolicy, "sample", sample)
    return queue


def test_the_engines_log_probs_are_those_of_the_rounded_weights(trainer):
    torch.manual_seed(0)
    out = fp8_engine(PROMPTS, trainer)
    names = ("prompt_ids", "completion_ids", "logprobs", "rollout_top_ids", "rollout_top_logp")
    for ids, tokens, logp, top_ids, top in zip(*(out[name] for name in names)):
        assert len(tokens) == len(logp) == len(top_ids) <= 6 and len(top[0]) == 20
        with torch.no_grad():
            logits = trainer.model(torch.tensor([ids + tokens])).logits[0] / 0.7
        exact = logits.log_softmax(-1)[len(ids) - 1 : -1].gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        difference = (exact - torch.tensor(logp)).abs().max()
        assert 1e-4 < difference < 0.5
        for token, known, ids_here, logp_here in zip(tokens, logp, top_ids, top):
            if token in ids_here:
                assert logp_here[ids_here.index(token)] == pytest.approx(known, abs=1e-4)


def test_every_prompts_last_rollout_is_its_solution(trainer):
    out = mixed_sources(PROMPTS, trainer)
    assert out["external"] == [False, True, False, True] and out["logprobs"] is None
    texts = [trainer.processing_class.decode(ids) for ids in out["completion_ids"]]
    assert texts[1] == "3+8=11-5=6<|eos|>" and texts[3] == "7-9=-2+2=0+4=4<|eos|>"


def test_the_agent_answers_turn_by_turn_and_its_signals_say_how(trainer, scripted):
    scripted += [["11", "12-5", "-2", "x"], ["6<|eos|>", "7", "0"], ["4<|eos|>"], ["6", "7", "4", "y"]]
    out = stepwise_agent(PROMPTS, trainer)
    tokens = [trainer.processing_class.decode(ids) for ids in out["completion_ids"]]
    assert tokens == ["3+8=11-5=6<|eos|>", "3+8=12-5=7", "7-9=-2+2=0+4=4<|eos|>", "7-9=x"]
    own = [
        "".join(c if m else "." for c, m in zip(list(t), mask)) for t, mask in zip(tokens[1:2], out["env_mask"][1:2])
    ]
    assert own == ["....12...7"] and out["env_mask"][3] == [0, 0, 0, 0, 1]
    assert [math.isnan(x) for x in out["logprobs"][1]] == [m == 0 for m in out["env_mask"][1]]
    assert out["error"] == [[0, 0], [1, 1], [0, 0, 0], [1]]
    assert out["support_edges"] == [[[0, 1]], [], [[0, 1], [1, 2]], []] and out["failed_edges"][1] == [[0, 1]]
    assert out["critical_turn"] == [-1, 0, -1, 0] and out["twin_rewards"] == [1.0, 0.0, 1.0, 0.0]
    assert out["action_ids"] == [["11", "6"], ["12", "7"], ["-2", "0", "4"], [""]]
    assert out["state_ids"][2] == ["0:", "1:-2", "2:0"]
    assert [len(gains) for gains in out["info_gain"]] == [1, 1, 2, 0]


def test_rollouts_that_have_said_the_same_share_a_node(trainer, scripted):
    scripted += [["11", "11", "1", "1"], ["6", "7", "2", "2"], ["3", "3"], ["0"] * 4]
    out = stepwise_agent(PROMPTS, trainer)
    first, second, third, fourth = out["node_path"]
    assert first[0] == second[0] and first[1] != second[1] and third == fourth and third[0] != first[0]
    assert out["node_ids"][0] == [-1, -1, -1, -1, first[0], first[0], -1, -1, -1, first[1]]
    assert [len(v) for v in out["block_embedding"]] == [2, 2, 3, 3]


def test_every_signal_has_one_entry_per_rollout(trainer):
    out = stepwise_agent(PROMPTS, trainer)
    assert set(AGENT_SIGNALS) == set(out) - {"prompt_ids", "completion_ids", "logprobs", "env_mask"}
    assert {len(values) for values in out.values()} == {4}
    turns = [sum(a and not b for a, b in zip(mask, [0, *mask])) for mask in out["env_mask"]]
    assert [len(x) for x in out["error"]] == turns and min(turns) >= 1


def test_values_fall_once_a_total_is_wrong():
    tokenizer = build_tiny_tokenizer()
    prompt, right, wrong = (tokenizer(t)["input_ids"] for t in ("<|user|>3+8-5=", "3+8=11-5=6", "3+8=12-5=7"))
    values = working_values([prompt, prompt], [right, wrong], [[True] * 10] * 2)
    assert values[0] == [0.8] * 10
    assert values[1] == [0.8] * 7 + [0.1] * 3  # a total is complete once something follows it
