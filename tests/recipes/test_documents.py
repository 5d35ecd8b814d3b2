"""Recipes that extend others: how they merge, and that a mistake is named in the file where it stands."""

import pytest
from typer.testing import CliRunner

import rlx_plugins as rlx
from rlx_plugins.cli import app
from rlx_plugins.recipes.checks import mistakes
from rlx_plugins.recipes.documents import merged, read_document
from rlx_plugins.recipes.schema import load

BASE = """\
host: [trl, verl]
profiles:
  tiny:
    steps: 20
    rewards: [accuracy, format]
    arguments:
      trl: {weight_decay: 0.1}
"""
CHILD = """\
extends: base/tiny.yaml
name: child
title: A child
plugins: {clip: ppo}
profiles:
  tiny: {steps: 5}
"""


@pytest.fixture
def files(tmp_path):
    """Writes files by name and returns the first one's path."""

    def write(**texts):
        paths = []
        for name, text in texts.items():
            path = tmp_path / f"{name.replace('__', '/')}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            paths.append(path)
        return paths[0]

    return write


def test_a_recipe_takes_what_its_base_says_and_changes_it(files):
    recipe = load(files(child=CHILD, base__tiny=BASE))
    tiny = recipe.profile("tiny")
    assert (recipe.hosts, tiny.steps, tiny.rewards) == (("trl", "verl"), 5, ["accuracy", "format"])
    assert tiny.arguments == {"weight_decay": 0.1}


def test_later_bases_win_and_the_file_wins_over_all(files):
    path = files(
        child=CHILD.replace("base/tiny.yaml", "[base/tiny.yaml, base/two.yaml]"),
        base__tiny=BASE,
        base__two="profiles: {tiny: {steps: 7, learning_rate: 0.5, rewards: [format]}}",
    )
    tiny = load(path).profile("tiny")
    assert (tiny.steps, tiny.learning_rate, tiny.rewards) == (5, 0.5, ["format"])


def test_a_base_may_extend_another(files):
    path = files(child=CHILD, base__tiny="extends: one.yaml\nprofiles: {tiny: {group_size: 4}}", base__one=BASE)
    assert load(path).profile("tiny").group_size == 4


@pytest.mark.parametrize(
    ("base", "change", "result"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}, {"a": {"b": 3, "c": 2}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": {"b": 1}}, {"a": 2}, {"a": 2}),
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({}, {"a": None}, {"a": None}),
        (
            {"plugins": {"clip": "bapo"}},
            {"plugins": {"clip": {"target": 1}}},
            {"plugins": {"clip": {"name": "bapo", "target": 1}}},
        ),
        (
            {"plugins": {"clip": {"name": "bapo", "target": 1}}},
            {"plugins": {"clip": {"name": "ppo"}}},
            {"plugins": {"clip": {"name": "ppo"}}},
        ),
        (
            {"plugins": {"clip": {"name": "bapo", "target": 1}}},
            {"plugins": {"clip": {"name": "bapo", "target": 2}}},
            {"plugins": {"clip": {"name": "bapo", "target": 2}}},
        ),
        ({"plugins": {"clip": "bapo"}}, {"plugins": {"clip": "ppo"}}, {"plugins": {"clip": "ppo"}}),
    ],
)
def test_mappings_merge_and_anything_else_replaces(base, change, result):
    assert merged(base, change) == result


def test_the_base_is_left_as_it_was(files):
    base = {"plugins": {"clip": {"name": "bapo"}}}
    merged(base, {"plugins": {"clip": {"target": 1}}})
    assert base == {"plugins": {"clip": {"name": "bapo"}}}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"child": CHILD, "base__tiny": BASE.replace("steps", "stepz")}, r"base/tiny\.yaml:4: unknown key .*stepz"),
        ({"child": CHILD.replace("steps: 5", "steps: x"), "base__tiny": BASE}, r"child\.yaml:6: profiles\.tiny\.steps"),
        (
            {"child": CHILD, "base__tiny": BASE + "    plugins: {clip: {eps_lo: 1}}\n"},
            r"base/tiny\.yaml:8: clip ppo: unknown parameter 'eps_lo'",
        ),
        ({"child": CHILD.replace("clip: ppo", "clip: pppo"), "base__tiny": BASE}, r"child\.yaml:4: unknown clip"),
        ({"child": CHILD, "base__tinny": BASE}, r"child\.yaml:1: extends: no such file .*did you mean 'tinny\.yaml'"),
        (
            {"child": CHILD, "base__tiny": "extends: ../child.yaml\n" + BASE},
            r"base/tiny\.yaml:1: .*leads back to itself",
        ),
        ({"child": CHILD.replace("base/tiny.yaml", "child.yaml")}, r"child\.yaml:1: .*\(child\.yaml -> child\.yaml\)"),
        ({"child": CHILD.replace("base/tiny.yaml", "{a: 1}")}, r"child\.yaml:1: extends: expected a file or a list"),
    ],
)
def test_a_mistake_is_named_in_the_file_where_it_stands(files, texts, message):
    with pytest.raises(rlx.ConfigError, match=message):
        load(files(**texts))


def test_the_place_of_a_key_is_that_of_the_last_file_that_says_it(files):
    document = read_document(files(child=CHILD, base__tiny=BASE))
    assert str(document.place("profiles", "tiny", "steps")).endswith("child.yaml:6")
    assert str(document.place("profiles", "tiny", "rewards", 1)).endswith("tiny.yaml:5")


def test_a_base_may_be_a_part_but_not_a_wrong_one(files):
    part = files(base__tiny=BASE)
    assert mistakes(part) == []
    wrong = files(base__tiny=BASE.replace("20", "0").replace("trl: {", "trll: {") + "plugins: {clip: pppo}\n")
    assert len(mistakes(wrong)) == 2  # of the form; plug-ins are looked at once the form is right
    assert "unknown clip 'pppo'" in mistakes(files(base__tiny=BASE + "plugins: {clip: pppo}\n"))[0]
    assert mistakes(files(other__tiny=BASE)) == [
        f"{files(other__tiny=BASE)}:1: the key {k!r} is missing" for k in ("name", "title")
    ]


def test_check_looks_at_all_files_and_tells_a_bases_mistake_once(files):
    alone = CHILD.replace("extends: base/tiny.yaml", "host: trl")
    base = BASE.replace("steps", "stepz")
    folder = files(child=CHILD, twin=CHILD, good=alone, base__tiny=base).parent
    result = CliRunner().invoke(app, ["check", str(folder)])
    assert result.exit_code == 1
    assert result.output.count("unknown key 'profiles.tiny.stepz'") == 1
    assert "3 of 4 files are wrong" in result.output and "good.yaml" in result.output


def test_check_accepts_right_files(files):
    folder = files(child=CHILD, base__tiny=BASE).parent
    result = CliRunner().invoke(app, ["check", str(folder)])
    assert result.exit_code == 0 and result.output.count("ok") == 2
