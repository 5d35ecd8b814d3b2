"""SMITH's axes, and their sum as TRL makes it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.core.errors import DataError
from rlx_plugins.rewards.smith import AXES
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import reward_batch

BUILD = {
    "role": "build",
    "blocks_ok": True,
    "names_ok": True,
    "params_ok": True,
    "schema_bad": False,
    "questions": [[1, 1]],
    "judge": [5],
    "align": "ok",
}
USE = {"role": "use", "correct": 1, "turns": 1, "calls_ok": 1, "final_answer": True}


def axes(facts, **parameters):
    return rlx.create("reward", "smith", **parameters).axes(facts)


def build(**changes):
    return axes(BUILD | changes)[:3]


def use(parameters=None, **changes):
    return axes(USE | changes, **(parameters or {}))[3:]


def test_each_role_has_its_own_axes():
    assert axes(BUILD)[:3] == (1.5, 2.5, 1.0) and all(map(math.isnan, axes(BUILD)[3:]))
    assert all(map(math.isnan, axes(USE)[:3])) and axes(USE)[4] == 1.0
    assert all(map(math.isnan, axes(None)))


@pytest.mark.parametrize(
    "broken", [{"schema_bad": True}, {"blocks_ok": False}, {"names_ok": False}, {"params_ok": False}]
)
def test_a_fatal_build_is_worth_nothing_but_is_judged(broken):
    assert build(**broken) == (0.0, 0.0, 1.0)


def test_without_strictness_what_is_right_counts():
    parts = axes(BUILD | {"names_ok": False}, strict=False)
    assert parts[:2] == (1.0, 2.0)
    assert axes(BUILD | {"schema_bad": True}, strict=False)[:2] == (0.0, 0.0)


def test_a_question_counts_if_it_is_right_and_used_the_tool():
    assert build(questions=[[1, 2], [1, 0], [0, 1], [1, 1]])[1] == 1.5 + 0.5
    assert build(questions=[])[1] == 1.5


@pytest.mark.parametrize(
    ("judge", "align", "want"),
    [
        ([4, 4, 3, 5], "ok", 0.8),
        ([9, -3], "ok", 0.5),
        ([4], "mismatch", 0.4),
        ([4], "missing", 0.0),
        ([4], "syntax", -0.5),
    ],
)
def test_the_judges_axis(judge, align, want):
    assert build(judge=judge, align=align)[2] == pytest.approx(want)


def test_an_absent_judge_leaves_the_row_out_and_an_unknown_alignment_is_an_error():
    assert math.isnan(build(judge=None)[2])
    with pytest.raises(DataError, match="align is one of ok, mismatch"):
        build(align="odd")


def test_efficiency_falls_from_one_over_seven_tenths_to_nothing():
    values = [use({"max_turns": 10}, turns=t)[0] / 2 for t in range(12)]
    assert values[0] == 1 and values[5] == pytest.approx(0.7) and values[10] == values[11] == 0
    assert values == sorted(values, reverse=True)
    assert use({"max_turns": 10}, turns=-3)[0] == 2 and use(correct=0)[0] == 0


def test_calls_and_a_final_answer_make_the_environments_axis():
    assert use(calls_ok=0)[1] == 0 and use(calls_ok=5)[1] == 1
    assert use({"want_calls": 4}, calls_ok=1, final_answer=False)[1] == pytest.approx(0.25 - 0.5)
    assert use({"want_calls": 0}, calls_ok=1)[1] == 1


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 6), st.integers(0, 3)), min_size=2, max_size=9
    )
)
def test_the_sum_is_trls_normalise_then_sum(rows):
    group = [g for g, *_ in rows]
    facts = [USE | {"correct": c, "turns": t, "calls_ok": k} for _, c, t, k in rows]
    out = evaluate("reward", "smith", {"rows": facts, "group": group}, {"weights": (1.0, 1.0, 0.2, 2.0, 0.5)})
    z = torch.zeros(len(rows), 5).double()
    for g in set(group):
        at = torch.tensor([x == g for x in group])
        if at.sum() > 1:
            x = out["components"][at]
            z[at] = torch.nan_to_num((x - x.mean(0)) / (x.std(0) + 1e-4))
    torch.testing.assert_close(out["per_axis"], z, rtol=1e-6, atol=1e-9)
    total = z @ torch.tensor([1, 1, 0.2, 2, 0.5]).double()
    torch.testing.assert_close(out["summed"], total, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(out["advantages"], (total - total.mean()) / (total.std() + 1e-4), rtol=1e-6, atol=1e-6)


def test_without_whitening_one_axis_alone_is_that_axis_normalised():
    facts = [USE | {"turns": t} for t in (1, 2, 4)]
    inputs = {"rows": facts, "group": [0, 0, 0]}
    out = evaluate("reward", "smith", inputs, {"weights": (0, 0, 0, 1, 0), "whiten": False})
    torch.testing.assert_close(out["advantages"], out["per_axis"][:, 3])
    alone = evaluate("reward", "smith", {"rows": [USE], "group": [0]})
    assert alone["advantages"].tolist() == [0]


def test_a_constant_axis_adds_nothing_and_rows_without_a_judge_are_left_out_of_its_statistics():
    rows = [BUILD | {"judge": j} for j in ([5], [1], None)]
    out = evaluate("reward", "smith", {"rows": rows, "group": [0, 0, 0]})
    assert not out["per_axis"][:, :2].any()
    assert out["per_axis"][:, 2].tolist() == pytest.approx([0.7071, -0.7071, 0], abs=2e-4)


def test_the_columns_are_named_and_an_advantage_of_one_reward_is_refused():
    columns = rlx.create("reward", "smith")(reward_batch([0.0, 0.0]).with_columns(smith_facts=[BUILD, None]))
    assert columns["component_names"] == AXES and columns["reward_components"].shape == (2, 5)
    with pytest.raises(
        rlx.ConfigError, match="reward smith shapes reward_components, but advantage grpo reads rewards"
    ):
        rlx.build({"reward": "smith"}, rlx.HostProfile("any", frozenset({"logp_old", "smith_facts"})))
