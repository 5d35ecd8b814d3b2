"""CADENCE's self-distillation: the vote, the buffer, and the phase that trains on it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.hosts.table import CALL, TableHost, TableTrainer
from rlx_plugins.hosts.table.facts import FACTS
from rlx_plugins.replay.cadence import _as_group
from rlx_plugins.testing import evaluate

ROW = st.tuples(
    st.integers(0, 2),
    st.sampled_from(["1", "2", "3", None]),
    st.integers(0, 1),
    st.floats(-3, 0).map(lambda x: round(x, 2)),
)


def vote(rows, **params):
    group, answers, correct, logp = (list(c) for c in zip(*rows, strict=True))
    inputs = {"group": group, "answers": answers, "correct": correct, "seq_mean_logp": logp}
    return evaluate("replay", "cadence", inputs, params)


@settings(max_examples=100, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=14))
def test_only_accepted_prompts_contribute_and_only_with_correct_rows_of_one_answer(rows):
    out = vote(rows, min_samples=2)
    for g in {g for g, *_ in rows}:
        chosen = [rows[i] for i in out["selected"] if rows[i][0] == g]
        share, accepted = out["prompts"][g]["share"], out["prompts"][g]["accepted"]
        assert bool(chosen) == accepted and len(chosen) <= 2
        assert all(c == 1 for _, _, c, _ in chosen) and len({a for _, a, _, _ in chosen}) <= 1
        if accepted:
            assert share >= 0.6
            same = [logp for gg, a, _, logp in rows if gg == g and a == chosen[0][1]]
            assert [x[3] for x in chosen] == sorted(same, reverse=True)[:2]
    expected = -sum(rows[i][3] for i in out["selected"]) / len(out["selected"]) if out["selected"] else 0.0
    assert float(out["loss"]) == pytest.approx(expected, abs=1e-12)


def test_without_gates_and_with_correct_groups_it_is_rejection_sampling():
    rows = [(0, "7", 1, -1.0), (0, "7", 1, -2.0), (0, None, 0, -0.1), (1, "3", 1, -0.5)]
    out = vote(rows, min_consistency=0, min_samples=1, max_per_prompt=None)
    assert sorted(out["selected"]) == [0, 1, 3]


def test_a_tie_goes_to_the_first_answer_in_order_and_is_then_judged():
    rows = [(0, "b", 1, -1.0), (0, "b", 1, -1.0), (0, "a", 0, -1.0), (0, "a", 0, -1.0)]
    assert vote(rows, min_consistency=0.5)["selected"] == []
    swapped = [(0, "a" if a == "b" else "b", c, logp) for _, a, c, logp in rows]
    assert vote(swapped, min_consistency=0.5)["selected"] == [0, 1]


def test_one_wrong_row_with_the_answer_refuses_the_prompt():
    assert vote([(0, "5", 1, -1.0)] * 3 + [(0, "5", 0, -1.0)])["selected"] == []


def test_a_prompt_nobody_answered_is_refused():
    assert vote([(0, None, 0, -1.0)] * 4)["prompts"][0] == {"share": 0.0, "accepted": False}


def trainer(plugins=None, **settings):
    host = TableHost(12, fields=FACTS)
    config = plugins or {"method": {"name": "cadence", "phase": 0.5, "min_samples": 3, "min_consistency": 0.3}}
    config = {**config, "reward": None}
    given = {"groups": 12, "group_size": 6, "max_tokens": 4, "total_steps": 6, "learning_rate": 0.3}
    return TableTrainer(config, host=host, **{**given, **settings})


def test_before_the_phase_verdicts_collect_and_in_it_nothing_is_generated():
    t = trainer()
    t.run(3)
    assert all(entry["generated"] > 0 for entry in t.log)
    buffer = [g["prompt_key"] for g in t.parts.one("replay").buffer]
    assert buffer and len(set(buffer)) == len(buffer)
    t.run(1)
    entry = t.log[-1]
    assert entry["generated"] == 0 and entry["replay/self_distilled"] == len(buffer)
    assert [g["prompt_key"] for g in t.parts.one("replay").buffer] == buffer


def test_in_the_phase_the_loss_and_its_gradient_are_those_of_supervised_fine_tuning():
    t = trainer()
    t.run(3)
    ctx = t.context()
    batch = t.rollouts(ctx)
    prepared = rlx.prepare(t.parts, batch)
    assert bool((batch.self_distilled == 1).all()) and bool(batch.correct.all())
    assert bool(batch.logp_rollout.isnan().all())
    t.host.policy.zero_grad()
    loss, _ = t.loss(prepared.batch, {"policy": prepared.batch.loss_count.sum()})
    loss.backward()
    found = t.host.policy.theta.grad.clone()
    t.host.policy.zero_grad()
    logp = t.host.logp(batch, t.host.logits(batch))
    mask = batch.response_mask
    expected = -(torch.where(mask, logp, 0.0).sum(1) / mask.sum(1)).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, t.host.policy.theta.grad)


def test_what_the_engine_reported_of_stored_tokens_is_forgotten():
    reported = torch.tensor([[7, 8]], dtype=torch.int32), torch.tensor([[-0.1, -2.5]])
    r = rlx.Rollout("p", "g", 0, [1], segments=[rlx.Segment([7], logp=[-0.1], top=reported)])
    (stored,) = _as_group([r])["rollouts"]
    assert [stored["segments"][0][name] for name in ("logp", "logp_behavior", "top")] == [None] * 3
    assert r.segments[0].top is reported


def test_a_later_verdict_replaces_the_earlier_one():
    t = trainer(learning_rate=1e-9)
    t.run(2)
    part = t.parts.one("replay")
    part.vote = lambda *arguments: {}
    before = part.buffer
    t.train_step()
    assert before and part.buffer == []  # every prompt was judged again, and none accepted


def test_while_nothing_is_accepted_ordinary_steps_go_on():
    plugins = {"replay": {"name": "cadence", "phase": 1.0, "min_samples": 99}}
    t = trainer(plugins)
    t.run(2)
    assert all(entry["generated"] > 0 for entry in t.log) and t.parts.one("advantage").name == "cadence"


def test_a_response_that_was_cut_off_does_not_vote():
    t = trainer({"replay": {"name": "cadence", "min_samples": 1, "min_consistency": 0}}, max_tokens=2)
    t.run(1)
    stored = [r for g in t.parts.one("replay").buffer for r in g["rollouts"]]
    assert stored and all(r["stop"] == "eos" for r in stored)


def test_answers_may_be_the_tokens_after_a_marker():
    part = rlx.create("replay", "cadence", marker=[7, 8])
    assert part.requires == {"rollout", "correct", "logp_old"}
    r = rlx.Rollout("p", "g", 0, [], segments=[rlx.Segment([7, 8, 1, 7, 8, 2, 3])])
    assert part._answer(r) == "2 3"
    r.segments = [rlx.Segment([7, 1, 8])]
    assert part._answer(r) is None
    t = trainer({"replay": {"name": "cadence", "marker": [CALL], "min_samples": 1, "min_consistency": 0.1}})
    t.run(2)
    assert all(CALL in s["tokens"] for g in t.parts.one("replay").buffer for r in g["rollouts"] for s in r["segments"])
    with pytest.raises(rlx.ConfigError, match="cadence.marker"):
        rlx.create("replay", "cadence", marker=())


def test_it_works_with_its_own_advantage_only():
    with pytest.raises(rlx.ConfigError, match="replay cadence works with advantage=cadence only, got advantage=grpo"):
        trainer({"replay": "cadence", "advantage": "grpo"})
