"""ADHint's advantage: parts of a group normalised apart, and weighed by what the hint did."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_plugins import ConfigError, HostProfile, build
from rlx_plugins.testing import evaluate

ROW = st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.5, 1.0, 2.0, math.nan]), st.booleans())


def run(rows, **params):
    group, rewards, hinted = (list(c) for c in zip(*rows, strict=True))
    return evaluate("advantage", "adhint", {"rewards": rewards, "group": group, "hinted": hinted}, params)


def zscores(values):
    scored = torch.tensor([v for v in values if not math.isnan(v)], dtype=torch.float64)
    if len(scored) < 2:
        return [0.0] * len(values)
    return [0.0 if math.isnan(v) else float((v - scored.mean()) / (scored.std() + 1e-6)) for v in values]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(ROW, min_size=1, max_size=12), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(["separate", "merged"])
)
def test_advantages_and_weights_are_what_the_equations_say(rows, lam, pool):
    out = run(rows, lam=lam, pool=pool, r_max=2.0)
    for g in {g for g, _, _ in rows}:
        base, gap = {}, 0.0
        members = [i for i, row in enumerate(rows) if row[0] == g]
        parts = [[i for i in members if rows[i][2] is hinted] for hinted in (False, True)]
        for pooled in parts if pool == "separate" else [members]:
            base |= dict(zip(pooled, zscores([rows[i][1] for i in pooled]), strict=True))
        solved = [[min(rows[i][1] / 2, 1) for i in part if not math.isnan(rows[i][1])] for part in parts]
        if all(solved):
            plain, helped = (sum(s) / len(s) for s in solved)
            gap = min(max(helped - plain, 0), 1)
        for i in members:
            a, hinted = base[i], rows[i][2]
            weight = 1.0
            if hinted:
                weight = 1 - lam * gap * ((a > 0) - (a < 0))
            elif a > 0:
                weight = 1 + lam * gap
            assert float(out["gap"][i]) == pytest.approx(gap)
            assert float(out["weights"][i]) == pytest.approx(weight)
            assert float(out["advantages"][i]) == pytest.approx(a * weight, abs=1e-9)


def test_without_hinted_rows_it_is_grpo():
    rows = [(0, 1.0, False), (0, 0.0, False), (1, 0.5, False), (1, 1.0, False), (1, 0.0, False)]
    want = evaluate("advantage", "grpo", {"rewards": [r for _, r, _ in rows], "group": [g for g, _, _ in rows]})
    torch.testing.assert_close(run(rows)["advantages"], want["advantages"])


def test_a_hint_that_does_not_help_weighs_nothing():
    out = run([(0, 1.0, False), (0, 1.0, False), (0, 0.0, True), (0, 1.0, True)])
    assert out["gap"].tolist() == [0] * 4 and out["weights"].tolist() == [1] * 4


def test_the_better_hinted_rows_do_the_less_a_hinted_success_is_worth():
    plain = [(0, 0.0, False), (0, 0.0, False), (0, 1.0, False)]
    worth = [float(run(plain + [(0, 1.0, True)] * k + [(0, 0.0, True)] * (4 - k))["weights"][3]) for k in range(1, 5)]
    assert worth[0] == 1  # as difficult as without
    assert worth[1] > worth[2] and worth[3] == 1  # an all-equal part has no advantage to weigh


def test_a_weight_that_would_turn_hinted_successes_around_is_refused():
    with pytest.raises(ConfigError, match="adhint.gap_weight: must be <= 1"):
        run([(0, 1.0, True)], lam=1.1)


def test_the_method_links_hint_advantage_and_selector():
    signals = frozenset({"logp_old", "entropy", "hint_mask", "helped"})
    host = HostProfile("any", signals=signals, capabilities=frozenset({"continue", "rounds"}))
    own = {"max_share": 0.4, "max_reward": 2.0, "gap_weight": 0.3, "tolerance": 2.0, "preserve": False}
    parts = build({"method": {"name": "adhint", **own}}, host)
    assert (parts.one("hint").max_share, parts.one("hint").max_reward) == (0.4, 2.0)
    assert (parts.one("advantage").gap_weight, parts.one("advantage").max_reward) == (0.3, 2.0)
    assert (parts.one("selector").tolerance, parts.one("selector").preserve) == (2.0, False)
