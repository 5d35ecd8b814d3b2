"""ERILS: which external rollouts stay, and how each source is scored."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate

ROW = st.tuples(
    st.integers(0, 1), st.sampled_from([0.0, 0.5, 1.0, math.nan]), st.booleans(), st.integers(1, 9)
)  # group, reward, external, length
ROWS = st.lists(ROW, min_size=1, max_size=14)


def run(rows, **params):
    names = ("group", "rewards", "is_external", "lengths")
    out = evaluate("advantage", "erils", dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)), params)
    return out["advantages"].tolist(), out["keep"].tolist()


def kept(rows, target, most):
    keep = [not external for *_, external, _ in rows]
    for g in {row[0] for row in rows}:
        fit = [i for i, (h, r, e, n) in enumerate(rows) if h == g and e and n <= target and not math.isnan(r)]
        fit.sort(key=lambda i: (target - rows[i][3], -rows[i][1], i))
        for i in fit[:most]:
            keep[i] = True
    return keep


@settings(max_examples=80, deadline=None)
@given(ROWS, st.integers(1, 9), st.one_of(st.none(), st.integers(0, 3)), st.sampled_from(["zero", "constant"]))
def test_rows_are_chosen_by_length_and_each_source_scored_on_its_own(rows, target, most, homogeneous):
    got, keep = run(rows, target_length=target, n_external=most, ext_weight=0.5, homogeneous=homogeneous)
    assert keep == kept(rows, target, most)
    for i, (g, r, external, _) in enumerate(rows):
        pool = [row[1] for k, row in zip(keep, rows, strict=True) if k and row[0] == g and row[2] == external]
        pool = torch.tensor([v for v in pool if not math.isnan(v)], dtype=torch.float64)
        want = 0.0
        if keep[i] and not math.isnan(r):
            if len(pool) > 1 and float(pool.std()) > 0:
                want = float((r - pool.mean()) / (pool.std() + 1e-6))
            elif external and homogeneous == "constant":
                want = r - 0.5
        assert got[i] == pytest.approx(want * (0.5 if external else 1), abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(ROWS)
def test_without_a_target_all_rows_stay_and_without_external_rows_both_modes_are_grpo(rows):
    assert all(run(rows)[1])
    own = [(g, r, False, n) for g, r, _, n in rows]
    want = evaluate("advantage", "grpo", {"rewards": [r for _, r, *_ in own], "group": [g for g, *_ in own]})
    plain = [a if sum(row[0] == g for row in own) > 1 else 0.0 for a, (g, *_) in zip(want["advantages"].tolist(), own)]
    alone = [sum(row[0] == g and not math.isnan(row[1]) for row in own) < 2 for g, *_ in own]
    plain = [0.0 if one else a for one, a in zip(alone, plain, strict=True)]
    assert run(own)[0] == pytest.approx(plain)
    assert run(own, mode="joint")[0] == pytest.approx(plain)


def test_the_closest_external_row_comes_first_then_the_best_rewarded_then_the_first():
    rows = [(0, 0.5, True, 4), (0, 1.0, True, 4), (0, 1.0, True, 4), (0, 0.0, True, 5), (0, 1.0, True, 7)]
    order = [run(rows, target_length=6, n_external=most)[1].count(True) for most in (0, 1, 2, 3, 9)]
    assert order == [0, 1, 2, 3, 4]
    assert run(rows, target_length=6, n_external=1)[1] == [False, False, False, True, False]
    assert run(rows, target_length=6, n_external=2)[1] == [False, True, False, True, False]
    assert run(rows, target_length=6, n_external=3)[1] == [False, True, True, True, False]


def test_the_joint_mode_scores_both_sources_together_and_knows_no_external_weight():
    rows = [(0, 0.0, False, 1), (0, 0.5, False, 1), (0, 1.0, True, 1)]
    assert run(rows, mode="joint", ext_weight=0.1)[0] == pytest.approx([-1, 0, 1], abs=1e-5)


def test_external_rows_without_weight_are_not_trained_on():
    rows = [(0, 0.0, True, 1), (0, 1.0, True, 1), (0, 0.0, False, 1), (0, 1.0, False, 1)]
    assert run(rows, ext_weight=0.0)[0] == pytest.approx([0, 0, -math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5)


def test_dropped_rows_leave_the_denominator_of_the_loss():
    host = rlx.HostProfile("any", signals=frozenset({"logp_old", "external"}))
    parts = rlx.build({"advantage": {"name": "erils", "target_length": 2}}, host)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]]).bool()
    batch = rlx.RolloutBatch(
        {
            "rewards": torch.tensor([0.0, 1.0, 1.0]),
            "group": torch.tensor([0, 0, 0]),
            "external": torch.tensor([False, True, False]),
            "response_mask": mask,
            "keep": torch.ones(3, dtype=torch.bool),
            "logp_old": torch.zeros(3, 3),
        }
    )
    ready = rlx.prepare(parts, batch).batch
    assert ready.external_kept.tolist() == [True, False, True]
    assert ready.loss_count.tolist() == [2, 0, 1]
    assert (ready.loss_weight[1] == 0).all() and (ready.advantages[1] == 0).all()


def test_a_number_of_external_rows_without_a_target_length_is_refused():
    with pytest.raises(rlx.ConfigError, match="max_external: chooses by closeness to target_length"):
        rlx.create("advantage", "erils", max_external=2)
