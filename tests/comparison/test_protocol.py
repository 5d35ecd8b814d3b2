"""What makes arms comparable, before and after the runs."""

import pytest

import rlx_plugins as rlx
from rlx_plugins.comparison.protocol import Budget, check_arms, match, spent, unequal
from rlx_plugins.comparison.runs import identity


def setting(**changes):
    """The identity of an arm, with fields of its profile changed."""
    profile = {"model": "tiny", "task": "tiny", "rewards": ["accuracy"], "arguments": {"max_steps": 20}}
    host = changes.pop("host", "trl")
    recipe = {"name": "x", "title": "x", "host": host, "profiles": {"tiny": profile | changes}}
    return identity({"recipe": recipe, "profile": "tiny", "seed": 0})


def check(other, metrics=("accuracy",), budget="steps"):
    return check_arms({"a": setting(), "b": other}, "a", metrics=metrics, budget=Budget.read(budget))


def test_arms_that_differ_in_plugins_only_have_no_differences():
    assert check(setting() | {"plugins": {"clip": "ppo"}}) == []


def test_other_arguments_are_listed():
    [found] = check(setting(arguments={"max_steps": 20, "learning_rate": 1e-3}))
    assert (found.arm, found.setting, found.baseline, found.value) == ("b", "learning_rate", None, 1e-3)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (setting(model="smollm"), "arm b has model 'smollm' and the baseline 'tiny'"),
        (setting(task="mine:task"), "neither data order nor weights"),
        (setting(host="verl"), "host 'verl'"),
        (setting(arguments={"max_steps": 30}), "max_steps=30 and the baseline 20: unequal budgets"),
    ],
)
def test_what_can_not_be_matched_is_refused(other, message):
    with pytest.raises(rlx.ConfigError, match=message):
        check(other)


def test_reward_is_refused_as_a_metric_of_other_rewards_but_weights_of_one_are_no_difference():
    with pytest.raises(rlx.ConfigError, match="'reward' is not the same quantity"):
        check(setting(weights=[2.0]), metrics=["accuracy", "reward"])
    assert [d.setting for d in check(setting(weights=[2.0]))] == ["weights"]
    assert check(setting(weights=[1.0]), metrics=["reward"]) == []


def test_a_baseline_that_is_no_arm_is_refused():
    with pytest.raises(rlx.ConfigError, match="no arm is called 'c' .*a, b"):
        check_arms({"a": setting(), "b": setting()}, "c", metrics=[], budget=Budget())


def test_a_token_budget_is_one_that_every_arm_ran_with():
    assert Budget.read("generated=2_000").overrides() == ["max_generated_tokens=2000"]
    both = setting(max_generated_tokens=2000)
    longer = setting(arguments={"max_steps": 40}, max_generated_tokens=2000)
    budget = Budget.read("generated=2000")
    assert len(check_arms({"a": both, "b": longer}, "a", metrics=[], budget=budget)) == 1
    with pytest.raises(rlx.ConfigError, match="arm b was run with max_generated_tokens=None"):
        check_arms({"a": both, "b": setting()}, "a", metrics=[], budget=budget)
    with pytest.raises(rlx.ConfigError, match="max_generated_tokens=2000 .*unequal budgets"):
        check_arms({"a": setting(), "b": both}, "a", metrics=[], budget=Budget())
    verl = setting(host="verl", arguments={}, max_generated_tokens=2000)
    with pytest.raises(rlx.ConfigError, match="counted in runs with plug-ins, and arm a has none"):
        check_arms({"a": verl}, "a", metrics=[], budget=budget)
    assert check_arms({"a": verl | {"plugins": {"advantage": "grpo"}}}, "a", metrics=[], budget=budget) == []


@pytest.mark.parametrize("text", ["tokens", "generated", "generated=", "generated=-5", "steps=3"])
def test_a_bad_budget_is_refused(text):
    with pytest.raises(rlx.ConfigError, match="--budget: steps, generated=TOKENS"):
        Budget.read(text)


def test_runs_of_equal_prompts_and_weights_match(make_run):
    got = match("b", make_run("b", 0), make_run("a", 0))
    assert (got.weights, got.steps, got.same, got.first_other, got.broken) == (True, 20, 20, None, False)


def test_other_prompts_break_a_match_unless_a_part_chooses_them(make_run):
    control = make_run("a", 0)
    prompts = [f"0.{i}" for i in range(1, 21)]
    prompts[4] = "other"
    got = match("b", make_run("b", 0, prompts=prompts), control)
    assert (got.same, got.first_other, got.broken) == (19, 5, True)
    assert "from step 5" in got.why
    own = match("c", make_run("c", 0, prompts=prompts, plugins={"sampler": "vade"}), control)
    assert (own.first_other, own.own_prompts, own.broken) == (5, True, False)
    expanded = match("d", make_run("d", 0, prompts=prompts, plugins={"method": "guide"}), control)
    assert not expanded.broken
    removed = match("e", make_run("e", 0, prompts=prompts, plugins={"sampler": None}), control)
    assert removed.broken


def test_other_weights_break_a_match_and_unrecorded_ones_do_not(make_run):
    control = make_run("a", 0)
    assert match("b", make_run("b", 0, weights="bb"), control).why == "other initial weights than the baseline's run"
    unknown = match("c", make_run("c", 0, weights=None), control)
    assert (unknown.weights, unknown.broken) == (None, False)


def test_budgets_are_those_at_the_end_and_ratios_beyond_the_tolerance_are_told(make_run):
    a, b = spent([make_run("a", 0), make_run("a", 1)]), spent([make_run("b", 0, tokens=140)])
    assert (a.steps, a.generated_tokens, a.update_tokens, a.seconds) == (20, 2000, 4000, 10)
    assert unequal(b, a) == pytest.approx({"generated_tokens": 1.4, "update_tokens": 1.4})
    assert unequal(a, a) == {}
    assert unequal(spent([]), a) == {}
