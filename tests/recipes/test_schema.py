"""Recipes: what is accepted, and that every mistake is named with its line before a host is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

import rlx_plugins as rlx
from rlx_plugins.recipes.schema import load, with_overrides

GOOD = """\
name: sample
title: A sample
papers: []
host: trl
plugins:
  advantage: grpo
  clip: {name: ppo, eps_high: 0.28}
profiles:
  tiny:
    rewards: [accuracy, format]
    weights: [1, 0.5]
    arguments:
      max_steps: 3
"""


@pytest.fixture
def recipe(tmp_path):
    def write(text=GOOD):
        path = tmp_path / "sample.yaml"
        path.write_text(text)
        return path

    return write


def test_a_good_recipe_is_read(recipe):
    r = load(recipe())
    assert (r.name, r.plugins["advantage"], r.profile("tiny").arguments) == ("sample", "grpo", {"max_steps": 3})


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ("plugin:", "plugins:", r"sample\.yaml:5: unknown key 'plugin'; did you mean 'plugins'"),
        ("argument:", "arguments:", r":12: unknown key 'profiles\.tiny\.argument'; did you mean 'arguments'"),
        ("host: trlx", "host: trl", r":4: host: .*got 'trlx'"),
        ("name: Sam ple", "name: sample", r":1: name: "),
        ("advantage: gropo", "advantage: grpo", r":6: unknown advantage 'gropo'; did you mean 'grpo'"),
        (
            "epsilon_high: 0.28",
            "eps_high: 0.28",
            r":7: clip ppo: unknown parameter 'epsilon_high'; did you mean 'eps_high'",
        ),
        ("eps_high: wide", "eps_high: 0.28", r":7: clip ppo\.eps_high: expected float, got 'wide'"),
        ("advantages: grpo", "advantage: grpo", r"unknown kind 'advantages'; did you mean 'advantage'"),
        ("weights: [1]", "weights: [1, 0.5]", r":11: profiles\.tiny\.weights: 1 weights for 2 rewards"),
        ("rewards: []", "rewards: [accuracy, format]", r":10: profiles\.tiny\.rewards"),
        ("  small:", "  tiny:", r"small"),
        ("title: [A", "title: A sample", r"not YAML"),
    ],
)
def test_a_mistake_is_named_with_its_line(recipe, wrong, right, message):
    assert right in GOOD
    with pytest.raises(rlx.ConfigError, match=message):
        load(recipe(GOOD.replace(right, wrong)))


def test_a_missing_key_is_named(recipe):
    with pytest.raises(rlx.ConfigError, match="the key 'host' is missing"):
        load(recipe(GOOD.replace("host: trl\n", "")))


def test_a_missing_file_names_the_similar_one(recipe):
    path = recipe()
    with pytest.raises(rlx.ConfigError, match=r"no such file; did you mean 'sample\.yaml'"):
        load(path.with_name("sampel.yaml"))


def test_a_list_instead_of_a_mapping_is_explained(recipe):
    with pytest.raises(rlx.ConfigError, match="a recipe is a mapping"):
        load(recipe("- a\n- b\n"))


def test_overrides_set_plugins_profile_fields_and_the_hosts_arguments(recipe):
    words = ["clip=ppo", "clip.eps_low=0.1", "learning_rate=1e-4", "model=smollm", "rewards=[accuracy]", "weights=[2]"]
    r = with_overrides(load(recipe()), words, "tiny")
    tiny = r.profile("tiny")
    assert r.plugins["clip"] == {"name": "ppo", "eps_low": 0.1}
    assert tiny.arguments == {"max_steps": 3, "learning_rate": 1e-4}
    assert (tiny.model, tiny.rewards, tiny.weights) == ("smollm", ["accuracy"], [2.0])


def test_overrides_leave_the_recipe_as_it_was(recipe):
    r = load(recipe())
    with_overrides(r, ["clip.eps_low=0.1", "lr=1", "advantage=none"], "tiny")
    assert r.plugins == {"advantage": "grpo", "clip": {"name": "ppo", "eps_high": 0.28}}
    assert r.profile("tiny").arguments == {"max_steps": 3}


def test_none_removes_one_plugin_or_all(recipe):
    assert "advantage" not in with_overrides(load(recipe()), ["advantage=none"], "tiny").plugins
    assert with_overrides(load(recipe()), ["plugins=none"], "tiny").plugins == {}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("clip", "expected key=value"),
        ("clip=pppo", "did you mean 'ppo'"),
        ("clip.eps=1", "unknown parameter 'eps'"),
        ("plugins=all", "plugins=none removes"),
        ("rewards=3", "rewards=3: Input should be a valid list"),
    ],
)
def test_a_bad_override_is_explained(recipe, word, message):
    with pytest.raises(rlx.ConfigError, match=message):
        with_overrides(load(recipe()), [word], "tiny")


def test_an_unknown_profile_is_named(recipe):
    with pytest.raises(rlx.ConfigError, match=r"no profile 'paper' \(it has tiny\)"):
        with_overrides(load(recipe()), [], "paper")


def test_checking_imports_no_host():
    root = Path(__file__).parents[2]
    code = (
        "import sys; from rlx_plugins.recipes.schema import load; "
        f"[load(p) for p in {[str(p) for p in (root / 'recipes').glob('*.yaml')]!r}]; "
        "bad = {'trl', 'verl', 'vllm', 'transformers', 'ray'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
