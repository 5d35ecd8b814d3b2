"""GAPO's group-adaptive upper bound: what the rollout side records, and the loss made of it."""

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.core.context import Context
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import run_loss

CTX = Context(0, 1, groups=1, group_size=4, max_tokens=4, prompts={})


def group_of(*rewards, name="g"):
    group = rlx.Group(name, name, [0])
    for reward in rewards:
        (rollout,) = group.start(1)
        rollout.segments = [rlx.Segment([1, 2], logp=[-1.0, -1.0])]
        rollout.reward = reward
        rollout.finish("eos")
    return group


def widths(group, **parameters):
    rlx.create("clip", "gapo_clip", eps_low=0.1, eps_high_max=0.5, **parameters).annotate([group], CTX)
    return [r.extras["gapo_eps_high"] for r in group.rollouts]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 0, 0], [0.5, 0.1, 0.1, 0.1, 0.1]),
        ([0, 1, 0, 1, 0], [0.1, 0.4, 0.1, 0.4, 0.1]),
        ([1, 1, 1, 1, 1], [0.1] * 5),
        ([0, 0, 0], [0.1] * 3),
        ([1], [0.1]),
    ],
    ids=["one of five", "two of five", "all", "none", "group of one"],
)
def test_a_success_is_the_freer_the_rarer_it_is(rewards, expected):
    assert widths(group_of(*rewards)) == pytest.approx(expected)


def test_a_rollout_without_a_reward_counts_neither_as_success_nor_as_member():
    assert widths(group_of(1, None, 0)) == pytest.approx([0.5, 0.1, 0.1])
    pruned = group_of(1, 1, 0)
    pruned.rollouts[1].state, pruned.rollouts[1].reward = "pruned", None
    assert widths(pruned) == pytest.approx([0.5, 0.1, 0.1])


def test_the_success_threshold_splits_rewards_that_are_not_binary():
    assert widths(group_of(0.5, 0.7, 0.2), success_threshold=0.5) == pytest.approx([0.1, 0.5, 0.1])


def test_the_bound_is_a_column_of_the_batch_that_survives_any_split_into_micro_batches():
    part = rlx.create("clip", "gapo_clip", eps_low=0.003, eps_high_max=0.005)
    groups = [group_of(1, 0, 1, name="a"), group_of(0, 1, name="b")]
    part.annotate(groups, CTX)
    batch = rlx.pack(groups, dtype=torch.float64)
    torch.testing.assert_close(batch.gapo_eps_high, torch.tensor([0.004, 0.003, 0.004, 0.003, 0.005]).double())
    host = rlx.HostProfile("any", signals=frozenset({"logp_old"}))
    parts = rlx.build({"method": {"name": "gapo", "eps_low": 0.003, "eps_high_max": 0.005}}, host)
    logp_new = -1 + torch.linspace(-0.006, 0.006, 10, dtype=torch.float64).reshape(5, 2)
    ready = rlx.prepare(parts, batch.with_columns(logp_old=torch.full((5, 2), -1.0).double())).batch
    totals = {"policy": ready.loss_count.sum()}
    whole = rlx.policy_loss(parts, ready, logp_new, totals=totals)[0]
    halves = [
        rlx.policy_loss(parts, ready.rows(rows), logp_new[rows], totals=totals)[0]
        for rows in (torch.tensor([0, 3]), torch.tensor([1, 2, 4]))
    ]
    torch.testing.assert_close(sum(halves), whole)


CASE = {
    "logp_old": [[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]],
    "rewards": [1.0, 0.0, 0.0],
    "group": [7, 7, 7],
    "response_mask": [[1, 1, 1], [1, 1, 0], [0, 0, 0]],
}


def test_on_policy_the_gradient_is_that_of_the_mean_over_rows_of_row_means():
    out = evaluate("clip", "gapo_clip", {**CASE, "logp_new": CASE["logp_old"]})
    want = torch.tensor([[-2 / 18] * 3, [1 / 12, 1 / 12, 0], [0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(out["grad_logp"], want)
    assert out["live"].tolist() == [1, 1, 0], "the empty row still counts in the group's baseline"


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_one_radius_for_all_is_the_ordinary_clip(level):
    logp_new = torch.tensor([[-0.9, -1.2, -0.7], [-1.4, -0.6, -1.0], [-1.0, -1.0, -1.0]], dtype=torch.float64)
    out = evaluate(
        "clip", "gapo_clip", {**CASE, "logp_new": logp_new}, {"eps_low": 0.1, "eps_high_max": 0.1, "level": level}
    )
    plain = run_loss(
        {"clip": rlx.create("clip", "ppo", eps_low=0.1, eps_high=0.1), "ratio": rlx.create("ratio", level)},
        logp_new=logp_new,
        logp_old=torch.tensor(CASE["logp_old"]).double(),
        advantages=[2 / 3, -1 / 3, -1 / 3],
        response_mask=CASE["response_mask"],
        agg="seq-mean-token-mean" if level == "sequence" else "token-mean",
    )
    for name in ("loss", "per_token_loss", "grad_logp"):
        torch.testing.assert_close(out[name], plain[name])


def test_garbage_under_the_mask_is_ignored():
    logp_new = [[-0.99, -1.01, -1.0], [-1.0, -1.002, None], [None, None, None]]
    out = evaluate("clip", "gapo_clip", {**CASE, "logp_new": logp_new})
    clean = [[-0.99, -1.01, -1.0], [-1.0, -1.002, 0.0], [0.0, 0.0, 0.0]]
    want = evaluate("clip", "gapo_clip", {**CASE, "logp_new": clean})
    for name in ("loss", "grad_logp", "ratio", "clipped"):
        torch.testing.assert_close(out[name], want[name])


def test_an_unscorable_rollout_is_left_out_and_has_no_gradient():
    out = evaluate("clip", "gapo_clip", {**CASE, "rewards": [1.0, None, 0.0], "logp_new": CASE["logp_old"]})
    assert out["advantages"].tolist() == [0.5, 0.0, -0.5] and not out["grad_logp"][1].any()
    assert out["eps_high"].tolist() == pytest.approx([0.005, 0.003, 0.003])


def test_the_level_brings_its_ratio_and_its_bounds():
    host = rlx.HostProfile("any", signals=frozenset({"logp_old"}))
    parts = rlx.build({"clip": "gapo_clip"}, host)
    assert parts.one("ratio").name == "sequence" and parts.one("clip").range == (3e-3, 5e-3)
    parts = rlx.build({"method": {"name": "gapo", "level": "token"}}, host)
    assert [parts.one(k).name for k in ("ratio", "aggregate")] == ["token", "token_mean"]
    assert parts.one("clip").range == (0.2, 0.28) and parts.one("advantage").scale == "none"
    with pytest.raises(rlx.ConfigError, match="works with ratio=sequence only"):
        rlx.build({"clip": "gapo_clip", "ratio": "token"}, host)


def test_a_widest_radius_below_the_narrow_one_is_refused():
    with pytest.raises(rlx.ConfigError, match="gapo_clip.eps_high_max: must be >= eps_low"):
        rlx.create("clip", "gapo_clip", eps_low=0.01)
