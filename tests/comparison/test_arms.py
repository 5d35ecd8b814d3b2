"""Arms as they are written on a command line."""

import pytest

import rlx_plugins as rlx
from rlx_plugins.comparison.arms import read_arms, read_seeds, split_words


def test_a_recipe_with_overrides_and_a_name(recipe_file):
    plain, own = read_arms(
        [f"plain={recipe_file}:plugins=none", f"{recipe_file}:clip=ppo,rewards=[accuracy,format]"],
        profile="tiny",
        overrides=["max_steps=7", "adam_beta2=0.9"],
    )
    assert (plain.name, plain.recipe.plugins) == ("plain", {})
    assert own.name == "sample-clip-ppo-rewards-accuracy-format"
    assert own.recipe.plugins == {"advantage": "dvao", "clip": "ppo"}
    assert own.recipe.profile("tiny").arguments == {"max_steps": 7, "adam_beta2": 0.9}


def test_an_arms_own_override_wins_over_the_common_one(recipe_file):
    first, _ = read_arms(
        [f"a={recipe_file}:learning_rate=2", f"b={recipe_file}"], profile="tiny", overrides=["learning_rate=1"]
    )
    assert first.recipe.profile("tiny").learning_rate == 2


def test_the_name_of_a_plain_recipe_is_the_recipes(recipe_file):
    arms = read_arms([str(recipe_file), f"x={recipe_file}:clip=ppo"], profile="tiny")
    assert [arm.name for arm in arms] == ["sample", "x"]


def test_folders_are_a_run_or_hold_runs_and_a_name_given_again_adds_to_the_arm(make_run, tmp_path):
    for seed in (0, 1):
        make_run("a", seed)
        make_run("b", seed)
    made = tmp_path / "made"
    a, b = read_arms(
        [str(made / "a"), f"other={made / 'b' / 'seed-0'}", f"other={made / 'b' / 'seed-1'}"], profile="tiny"
    )
    assert (a.name, [run.seed for run in a.runs]) == ("a", [0, 1])
    assert (b.name, [run.seed for run in b.runs]) == ("other", [0, 1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{r}"], "two arms or more"),
        (["{r}", "{r}"], "two arms are called 'sample'.*name them"),
        (["{r}", "x={r}:clip=pppo"], "did you mean 'ppo'"),
        (["{r}", "{r}x"], "no such file"),
        (["a={d}/a", "a={d}/a", "{r}"], "seed 0 occurs twice"),
        (["{r}", "{d}"], "neither a run"),
    ],
)
def test_a_mistake_is_explained(words, message, recipe_file, make_run, tmp_path):
    make_run("a", 0)
    words = [word.format(r=recipe_file, d=tmp_path / "made") for word in words]
    with pytest.raises(rlx.ConfigError, match=message):
        read_arms(words, profile="tiny")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("clip=ppo", ["clip=ppo"]),
        ("a=[1,2],b={x: 1, y: 2},c=3", ["a=[1,2]", "b={x: 1, y: 2}", "c=3"]),
        ("a='x,y',b=1", ["a='x,y'", "b=1"]),
    ],
)
def test_commas_inside_brackets_and_quotes_do_not_split(text, words):
    assert split_words(text) == words


def test_seeds_are_a_number_or_a_list():
    assert read_seeds("3") == [0, 1, 2]
    assert read_seeds("7,3") == [7, 3]
    for wrong in ("0", "x", "1,1", "-1,2", "1,"):
        with pytest.raises(rlx.ConfigError, match="--seeds"):
            read_seeds(wrong)
