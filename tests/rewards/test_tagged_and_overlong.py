"""EHPO's product reward over tagged units, and Apriel's overlong penalty."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.rewards.ehpo import tagged_units
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import reward_batch

NAN = math.nan

# ---- ehpo ------------------------------------------------------------------------------------------------------------

ROW = st.tuples(
    st.integers(0, 2), st.integers(0, 1), st.integers(0, 1), st.integers(0, 5), st.integers(0, 5), st.integers(0, 1)
)


def ehpo(rows, **parameters):
    group, form, correct, easy, hard, reflecting = (list(x) for x in zip(*rows, strict=True))
    inputs = {
        "format_ok": form,
        "correct": correct,
        "group": group,
        "easy_units": easy,
        "hard_units": hard,
        "easy_with_reflection": reflecting,
        "hard_without_reflection": [0] * len(rows),
    }
    return evaluate("reward", "ehpo", inputs, parameters)


@settings(max_examples=50, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=10), st.floats(0, 1))
def test_the_reward_is_the_product_and_is_positive_only_for_a_correct_row(rows, beta):
    out = ehpo(rows, beta=beta)
    for i, (g, form, correct, easy, hard, reflecting) in enumerate(rows):
        peers = [r[2] for r in rows if r[0] == g]
        rate = sum(peers) / len(peers)
        n = easy + hard
        mix = rate * easy / n + (1 - rate) * hard / n if n else 0.0
        mode = beta + (1 - beta) * mix
        assert float(out["pass_rate"][i]) == pytest.approx(rate) and float(out["mode"][i]) == pytest.approx(mode)
        assert float(out["reward"][i]) == pytest.approx(form * correct * (not reflecting) * mode)
        assert beta - 1e-12 <= mode <= 1 + 1e-12


def test_easy_units_fit_a_solved_prompt_hard_ones_a_failed_one_and_any_mix_a_half_solved_one():
    solved = ehpo([(0, 1, 1, e, 4 - e, 0) for e in range(5)])["mode"]
    assert (solved.diff() > 0).all()
    failed = ehpo([(0, 1, 0, e, 4 - e, 0) for e in range(5)])["mode"]
    torch.testing.assert_close(failed, solved.flip(0))
    half = ehpo([(0, 1, e % 2, e, 3 - e, 0) for e in range(4)])["mode"]
    torch.testing.assert_close(half, torch.full((4,), 0.75).double())


def test_without_units_the_mode_is_its_floor_and_at_floor_one_it_is_constant():
    assert ehpo([(0, 1, 1, 0, 0, 0)], beta=0.3)["reward"].tolist() == pytest.approx([0.3])
    assert ehpo([(0, 1, 1, 3, 1, 0), (0, 1, 0, 1, 1, 0)], beta=1.0)["mode"].tolist() == [1, 1]


def test_a_hard_unit_that_does_not_reflect_breaks_the_tags():
    inputs = {"format_ok": [1], "correct": [1], "group": [0], "easy_units": [1], "hard_units": [2]}
    checks = {"easy_with_reflection": [0], "hard_without_reflection": [2]}
    out = evaluate("reward", "ehpo", inputs | checks)
    assert out["reward"] == 0 and out["unit"] == 0


@pytest.mark.parametrize("name", ["format_ok", "correct", "easy_units", "hard_without_reflection"])
def test_an_unknown_input_gives_nothing(name):
    inputs = {"format_ok": [1, 1], "correct": [1, 1], "group": [0, 0], "easy_units": [1, 1], "hard_units": [2, 2]}
    inputs |= {"easy_with_reflection": [0, 0], "hard_without_reflection": [0, 0]}
    inputs[name] = [None, inputs[name][1]]
    out = evaluate("reward", "ehpo", inputs)
    assert out["reward"][0] == 0 and out["reward"][1] > 0 and not torch.isnan(out["mode"]).any()


def test_tokens_may_be_counted_in_place_of_units():
    inputs = {"format_ok": [1], "correct": [1], "group": [0], "easy_units": [30], "hard_units": [10]}
    inputs |= {"easy_with_reflection": [0], "hard_without_reflection": [0]}
    assert evaluate("reward", "ehpo", inputs, {"by": "tokens"})["mode"].tolist() == pytest.approx([0.5 + 0.5 * 0.75])
    assert "easy_tokens" in rlx.create("reward", "ehpo", by="tokens").requires


def test_an_unscorable_row_does_not_enter_the_pass_rate():
    # The host's column `correct` is a flag: False for the row that could not be scored.
    columns = {"format_ok": [1, 1, 1], "easy_units": [1, 1, 1], "hard_units": [0, 0, 0]}
    columns |= {"easy_with_reflection": [0, 0, 0], "hard_without_reflection": [0, 0, 0]}
    batch = reward_batch([1.0, NAN, 0.0]).with_columns(
        correct=torch.tensor([True, False, False]), **{k: torch.tensor(v).double() for k, v in columns.items()}
    )
    out = rlx.create("reward", "ehpo")(batch)
    assert out["ehpo_pass_rate"].tolist() == [0.5, 0.5, 0.5]
    assert out["rewards"][0] == 0.75 and torch.isnan(out["rewards"][1]) and out["rewards"][2] == 0


def test_tagged_units_are_counted_in_a_text():
    text = (
        "<easy>2+2 is 4</easy> <Easy>wait, is it?</Easy>\n<hard>Hmm, let\nme verify</hard><hard>so 7</hard><easy>open"
    )
    want = {"easy_units": 2, "hard_units": 2, "easy_with_reflection": 1, "hard_without_reflection": 1}
    assert tagged_units(text) == want
    assert tagged_units("<easy>waiter</easy>")["easy_with_reflection"] == 0


# ---- apriel ----------------------------------------------------------------------------------------------------------


def apriel(rows, **parameters):
    """Rows of (reward, success, length, finished)."""
    rewards, success, length, finished = (list(x) for x in zip(*rows, strict=True))
    inputs = {"rewards": rewards, "success": success, "length": length, "finished": finished, "group": [0] * len(rows)}
    return evaluate("reward", "apriel", inputs, {"max_tokens": 20, "buffer_tokens": 10} | parameters)


@pytest.mark.parametrize(("length", "want"), [(0, 0), (10, 0), (11, -0.1), (15, -0.5), (20, -1.0), (21, 0)])
def test_the_penalty_ramps_up_over_the_buffer(length, want):
    assert apriel([(1, 1, length, 1)])["penalty"].tolist() == pytest.approx([want])


def test_a_success_pays_by_a_power_of_the_success_rate_and_a_failure_its_share():
    rows = [(1, 1, 15, 1), (0, 0, 15, 1), (0, 0, 5, 1), (0, 0, 5, 1)]
    assert apriel(rows, gamma=2.0, failure_scale=0.4)["scale"].tolist() == pytest.approx([1 / 16, 0.4, 0.4, 0.4])
    out = apriel(rows, gamma=2.0, failure_scale=0.4)
    torch.testing.assert_close(out["rewards"], torch.tensor([1, 0, 0, 0.0]).double() + out["scale"] * out["penalty"])


def test_the_rarer_the_success_the_less_it_pays_and_alone_or_without_exponent_it_pays_in_full():
    paid = [-float(apriel([(1, 1, 18, 1)] + [(0, 0, 1, 1)] * k)["rewards"][0] - 1) for k in (0, 1, 3)]
    assert paid == pytest.approx([0.8, 0.4, 0.2])
    assert apriel([(1, 1, 18, 1), (0, 0, 1, 1)], gamma=0.0)["rewards"][0] == pytest.approx(0.2)


def test_a_success_cut_off_at_the_limit_pays_in_full_and_one_that_ends_there_does_not():
    out = apriel([(1, 1, 20, 0), (1, 1, 20, 1), (0, 0, 1, 1), (0, 0, 1, 1)])
    assert out["scale"].tolist() == pytest.approx([1, 0.5, 1, 1])


def test_an_answer_worth_exactly_the_threshold_failed():
    assert apriel([(0.5, 0.5, 15, 1), (1, 1, 15, 1)])["scale"].tolist() == [1, 0.5]


def test_success_may_be_given_by_the_librarys_name():
    inputs = {"rewards": [1, 0], "correct": [1, 0], "length": [15, 15], "finished": [1, 1], "group": [0, 0]}
    out = evaluate("reward", "apriel", inputs, {"max_tokens": 20, "buffer_tokens": 10})
    assert out["scale"].tolist() == [0.5, 1]


def test_without_a_buffer_nothing_changes():
    out = apriel([(1, 1, 20, 0), (0, 0, 15, 1)], buffer_tokens=0)
    assert out["rewards"].tolist() == [1, 0] and out["penalty"].tolist() == [0, 0] and out["scale"].tolist() == [1, 1]


def test_unjudged_rows_stay_unscorable_and_out_of_the_rate():
    out = apriel([(NAN, NAN, 15, 1), (1, 1, 15, 1), (0, 0, 15, 1)])
    assert torch.isnan(out["rewards"][0]) and out["scale"][1] == 0.5


def test_a_buffer_beyond_the_limit_is_refused():
    with pytest.raises(rlx.ConfigError, match=r"apriel\.buffer_tokens: must be <= max_tokens"):
        rlx.create("reward", "apriel", max_tokens=100, buffer_tokens=101)
