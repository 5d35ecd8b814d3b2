"""Short answers: what is boxed, what counts as the same, and the rewards made of it."""

import pytest

from rlx_plugins.recipes.answers import (
    accuracy_reward,
    boxed,
    compute_score,
    format_reward,
    reference_answer,
    same_answer,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a{b}c} and more", "a{b}c"),
        (r"\boxed{}", ""),
        (r"\boxed{never closed", None),
        ("42", None),
    ],
)
def test_the_last_box_is_the_answer(text, answer):
    assert boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [("5 + 5 = <<5+5=10>>10\n#### 10", "10"), (r"hence \boxed{7}", "7"), (" x^2 ", "x^2"), ("1 #### 2 #### 3", "3")],
)
def test_a_reference_may_be_a_worked_solution(text, answer):
    assert reference_answer(text) == answer


@pytest.mark.parametrize(
    ("given", "reference"),
    [
        ("42", "42.0"),
        ("1,234", "1234"),
        (r"\frac{3}{4}", "0.75"),
        (r"-\dfrac{1}{2}", "-1/2"),
        (r"\frac{-1}{2}", "-0.5"),
        (r"-\frac{-1}{2}", "1/2"),
        (r"50\%", "50"),
        (r"\$5", "5"),
        (r"90^\circ", "90"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"12 \text{ cm}", "12"),
        ("X", "x"),
        ("7.", "7"),
    ],
)
def test_the_same_answer_may_be_written_in_several_ways(given, reference):
    assert same_answer(given, reference)


@pytest.mark.parametrize(
    ("given", "reference"), [("42", "43"), ("(1,2)", "(2,1)"), (r"\frac{1}{0}", "0"), ("1,23", "123"), ("", "0")]
)
def test_other_answers_differ(given, reference):
    assert not same_answer(given, reference)


def test_rewards_read_plain_and_conversational_completions():
    completions = [r"\boxed{4}", [{"role": "assistant", "content": r"it is \boxed{5}"}], "4"]
    assert accuracy_reward(completions, ["4", "4", "4"]) == [1.0, 0.0, 0.0]
    assert format_reward(completions) == [1.0, 1.0, 0.0]


def test_verls_score_is_the_weighted_sum_with_its_parts():
    assert compute_score("x", r"\boxed{4}", "5", {}, format=0.25) == {"score": 0.25, "accuracy": 0.0, "format": 1.0}
    assert compute_score("x", r"\boxed{5}", "5") == {"score": 1.0, "accuracy": 1.0, "format": 1.0}
