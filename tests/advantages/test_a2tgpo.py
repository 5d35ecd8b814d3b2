"""A2TGPO's turn credit: what the papers' formulas imply, and the information gain made at the end of a rollout."""

import math

import pytest
import torch

from rlx_plugins import ConfigError, Context, HostProfile, Segment, build, create
from rlx_plugins.core.registry import implements
from rlx_plugins.core.trajectory import Group
from rlx_plugins.hosts.table import CALL, TableHost, TableTrainer
from rlx_plugins.testing import evaluate

ROWS = {
    "rewards": [1.0, 0.0, 0.4],
    "group": [0, 0, 0],
    "turn_ids": [[0, 0, -1, 1, 2, 2], [0, -1, 1, 1, -1, -1], [0, 0, -1, 1, -1, 2]],
    "info_gain": [[0.2, 0.1], [0.05], [0.05, 0.3]],
}


def form(**changes):
    return evaluate("advantage", "a2tgpo", {**ROWS, **changes})


def test_without_the_gain_it_is_grpo():
    out = form(alpha=0.0)
    grpo = evaluate("advantage", "grpo", {k: ROWS[k] for k in ("rewards", "group")})["advantages"]
    want = torch.where(torch.tensor(ROWS["turn_ids"]) >= 0, grpo[:, None], 0.0)
    torch.testing.assert_close(out["advantages"], want)


def test_gains_are_compared_within_prompt_and_turn():
    norm = form(group=[0, 0, 7])["norm_ig"]
    assert sum(row[0] for row in norm[:2]) == pytest.approx(0, abs=1e-9)
    assert norm[2] == [0, 0] and norm[0][1] == 0, "alone at their turn"


def test_adding_a_constant_to_a_prompts_turn_changes_nothing():
    moved = [[0.2 + 5, 0.1 - 3], [0.05 + 5], [0.05 + 5, 0.3 - 3]]
    torch.testing.assert_close(form(info_gain=moved)["advantages"], form()["advantages"])


def test_equal_gains_leave_the_outcome_and_equal_rewards_leave_the_gain():
    same = form(info_gain=[[0.1, 0.3], [0.1], [0.1, 0.3]])
    torch.testing.assert_close(same["advantages"], form(alpha=0.0)["advantages"], rtol=0, atol=1e-12)
    alone = form(rewards=[0.3] * 3)["turn_advantages"]
    assert alone[0][2] == 0 and alone[0][0] == pytest.approx(0.3 * (1.414194 - 0.999990) / math.sqrt(2), abs=1e-5)


def test_discounted_gains_are_summed_from_the_turn_on_and_divided_by_the_root_of_their_number():
    out = form(gamma=0.5, alpha=1.0)
    first, second = out["norm_ig"][2]
    outcome = out["turn_advantages"][2][2]
    assert out["turn_advantages"][2][0] == pytest.approx(outcome + (first + 0.5 * second) / math.sqrt(2))
    assert out["turn_advantages"][2][1] == pytest.approx(outcome + second)


def test_a_gain_that_could_not_be_scored_counts_as_a_turn_and_nothing_else():
    out = form(info_gain=[[0.2, None], [0.05], [0.05, 0.3]])
    first = out["norm_ig"][0][0]
    assert out["norm_ig"][0][1] == 0 and out["norm_ig"][2][1] == 0
    outcome = out["turn_advantages"][0][2]
    assert out["turn_advantages"][0][0] == pytest.approx(outcome + 0.3 * first / math.sqrt(2))


def test_the_variance_of_the_accumulated_gain_does_not_depend_on_the_turn():
    g = torch.Generator().manual_seed(0)
    rows, turns = 4000, 4
    gains = torch.randn(rows, turns, generator=g, dtype=torch.float64)
    ids = torch.arange(turns + 1).expand(rows, -1)
    out = form(rewards=[0.5] * rows, group=[0] * rows, turn_ids=ids, info_gain=gains.tolist(), alpha=1.0)
    spread = torch.tensor(out["turn_advantages"])[:, :turns].std(0)
    assert spread.tolist() == pytest.approx([1.0] * turns, abs=0.05)


def test_a_row_without_tool_turns_has_its_outcome_and_the_clip_scale_follows_the_gain():
    out = form(turn_ids=[[0, 0, -1, 1, 2, 2], [0, -1, 0, 0, -1, -1], [-1] * 6], info_gain=[[0.2, 0.1], [], [0.05, 0.3]])
    assert out["advantages"][1, 0] == out["turn_advantages"][1][0] and len(out["turn_advantages"][1]) == 1
    assert not out["advantages"][2].any()
    scale = out["clip_scale"]
    assert (scale[0, 0] - 1) * out["norm_ig"][0][0] > 0 and scale[0, 4] == 1 and scale[1].eq(1).all()


def test_a_turn_beyond_the_widest_row_has_the_outcome():
    out = form(turn_ids=[[0, 1, 2, 3, 9, 9], [0, -1, 1, 1, -1, -1], [0, 0, -1, 1, -1, 2]])
    assert out["advantages"][0, 4] == out["advantages"][0, 2] == out["turn_advantages"][0][2]


# ---- information gain ----------------------------------------------------------------------------------------------


def dialogue(*turns):
    """A finished rollout of prompt p0: model turns with one token of tool output between them."""
    group = Group("g", "p0", [100], extras={"gold": [1, 2]})
    (rollout,) = group.start(1)
    for n, tokens in enumerate(turns):
        if n:
            rollout.segments.append(Segment([4], "tool", turn=n - 1))
        rollout.segments.append(Segment(list(tokens), "policy", None, 0, turn=n))
    rollout.finish("eos")
    return group, rollout


def answered(group, part, host):
    steps = part.annotate([group], Context(0, 1, groups=1, group_size=1, max_tokens=9, prompts={}))
    operation = next(steps)
    with pytest.raises(StopIteration):
        steps.send(host.forward(operation))
    return operation


def test_the_gain_is_the_rise_of_the_answers_mean_probability_over_each_turn():
    host = TableHost(2)
    group, rollout = dialogue([1, CALL], [0, CALL], [1, 2])
    operation = answered(group, create("advantage", "a2tgpo", column="gold"), host)
    assert [r.tokens for r in operation.rollouts] == [[1, 2], [1, 3, 4, 1, 2], [1, 3, 4, 0, 3, 4, 1, 2]]
    p = [math.exp(sum(logp[-2:]) / 2) for logp in host.forward(operation)]
    assert rollout.extras["info_gain"] == pytest.approx([p[1] - p[0], p[2] - p[1]])
    assert rollout.tokens == [1, 3, 4, 0, 3, 4, 1, 2], "scoring leaves the rollout alone"


def test_without_a_gold_answer_the_gains_are_unknown():
    group, rollout = dialogue([1, CALL], [1, 2])
    group.extras["gold"] = None
    steps = create("advantage", "a2tgpo", column="gold").annotate([group], Context(0, 1, 1, 1, 9, {}))
    assert list(steps) == [] and [math.isnan(x) for x in rollout.extras["info_gain"]] == [True]


def trainer(spec, **options):
    host = TableHost(8, turns=3, seed=1, **options)
    return TableTrainer({"method": {"name": "a2tgpo", **spec}}, host=host, groups=6, group_size=8, max_tokens=12)


def test_the_table_host_scores_every_turn_but_the_last():
    run = trainer({"column": "solution"})
    batch = run.rollouts(run.context())
    assert [len(gains) for gains in batch.info_gain] == batch.turn_ids.amax(1).tolist()
    assert any(batch.info_gain) and all(0 < abs(x) < 1 for gains in batch.info_gain for x in gains)
    assert all(math.isfinite(entry["loss"]) for entry in run.run(2))


def test_it_trains_on_gains_that_rollout_code_returns():
    gains = {"info_gain": lambda r: [0.1 * r.slot] * (r.segments[-1].turn)}
    run = trainer({}, fields=gains)
    batch = run.rollouts(run.context())
    out = run.parts.one("advantage")(batch)
    assert out["norm_ig"].any() and not out["norm_ig"][~batch.response_mask].any()
    assert all(entry["clip/scale"] != 1 and math.isfinite(entry["loss"]) for entry in run.run(2))


def test_rollout_code_that_returns_the_gains_needs_no_hook():
    given = create("advantage", "a2tgpo")
    assert not implements(given, "annotate") and implements(given.replace(column="gold"), "annotate")
    with pytest.raises(ConfigError, match="needs the signal 'info_gain'"):
        build({"advantage": "a2tgpo"}, HostProfile("any", signals=frozenset({"turn_ids"})))
