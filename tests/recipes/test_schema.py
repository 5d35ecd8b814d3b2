"""Recipes: what is accepted, and that every mistake is named with its file and line before a host is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

import rlx_plugins as rlx
from rlx_plugins.recipes.checks import mistakes
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
    steps: 3
    plugins: {clip: {eps_low: 0.1}}
    arguments:
      weight_decay: 0.1
"""

BOTH = GOOD.replace("host: trl", "host: [trl, verl]").replace(
    "      weight_decay: 0.1\n", "      trl: {weight_decay: 0.1}\n      verl: {trainer.save_freq: 5}\n"
)


@pytest.fixture
def recipe(tmp_path):
    def write(text=GOOD):
        path = tmp_path / "sample.yaml"
        path.write_text(text)
        return path

    return write


def test_a_good_recipe_is_read(recipe):
    r = load(recipe())
    tiny = r.profile("tiny")
    assert (r.name, r.host, r.hosts, r.plugins["advantage"]) == ("sample", "trl", ("trl",), "grpo")
    assert (tiny.steps, tiny.arguments) == (3, {"weight_decay": 0.1})


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ("plugin:\n", "plugins:\n", r"sample\.yaml:5: unknown key 'plugin'; did you mean 'plugins'"),
        ("argument:", "arguments:", r":14: unknown key 'profiles\.tiny\.argument'; did you mean 'arguments'"),
        ("stepz: 3", "steps: 3", r":12: unknown key 'profiles\.tiny\.stepz'; did you mean 'steps'"),
        ("steps: 0", "steps: 3", r":12: profiles\.tiny\.steps: .*greater than or equal to 1, got 0"),
        ("host: trlx", "host: trl", r":4: host: unknown host, got 'trlx'; did you mean 'trl'"),
        ("host: []", "host: trl", r":4: host: expected different hosts, got \[\]"),
        ("host: [trl, trl]", "host: trl", r":4: host: expected different hosts"),
        ("name: Sam ple", "name: sample", r":1: name: "),
        ("advantage: gropo", "advantage: grpo", r":6: unknown advantage 'gropo'; did you mean 'grpo'"),
        (
            "epsilon_high: 0.28",
            "eps_high: 0.28",
            r":7: clip ppo: unknown parameter 'epsilon_high'; did you mean 'eps_high'",
        ),
        ("eps_high: wide", "eps_high: 0.28", r":7: clip ppo\.eps_high: expected float, got 'wide'"),
        ("{eps_low: low}", "{eps_low: 0.1}", r":13: clip ppo\.eps_low: expected float, got 'low'"),
        ("advantages: grpo", "advantage: grpo", r":6: unknown kind 'advantages'; did you mean 'advantage'"),
        ("weights: [1]", "weights: [1, 0.5]", r":11: profiles\.tiny\.weights: 1 weights for 2 rewards"),
        ("rewards: []", "rewards: [accuracy, format]", r":10: profiles\.tiny\.rewards"),
        ("[accuracy, from]", "[accuracy, format]", r":10: profiles\.tiny\.rewards: unknown reward 'from'"),
        (
            "task: tinny\n    steps: 3",
            "steps: 3",
            r":12: profiles\.tiny\.task: unknown task 'tinny'; did you mean 'tiny'",
        ),
        ("  small:\n", "  tiny:\n", r"small"),
        ("title: [A", "title: A sample", r"not YAML"),
        ("\tclip: ppo\n", "  advantage: grpo\n", r"not YAML: .*; indent with spaces, not tabs"),
        ("   clip: ppo\n", "  advantage: grpo\n", r"not YAML: .*; is this line indented like its neighbours\?"),
        ("advantage:grpo", "advantage: grpo", r"not YAML: .* a space after a colon is missing"),
        ("name: again", "title: A sample", r":2: the key 'name' is given twice \(first in line 1\)"),
    ],
)
def test_a_mistake_is_named_with_its_line(recipe, wrong, right, message):
    assert right in GOOD
    with pytest.raises(rlx.ConfigError, match=message):
        load(recipe(GOOD.replace(right, wrong)))


def test_all_mistakes_are_told_at_once(recipe):
    text = GOOD.replace("grpo", "gropo").replace("eps_high: 0.28", "eps_high: wide").replace("eps_low: 0.1", "eps: 1")
    found = mistakes(recipe(text))
    assert [line.split(":")[1] for line in found] == ["6", "7", "13"]


def test_a_missing_key_is_named(recipe):
    with pytest.raises(rlx.ConfigError, match="the key 'host' is missing"):
        load(recipe(GOOD.replace("host: trl\n", "")))


def test_a_missing_file_names_the_similar_one(recipe):
    path = recipe()
    with pytest.raises(rlx.ConfigError, match=r"no such file; did you mean 'sample\.yaml'"):
        load(path.with_name("sampel.yaml"))


def test_a_file_in_a_missing_folder_names_the_similar_one_in_a_folder_beside_it(recipe):
    path = recipe()
    wrong = path.parent.with_name(f"{path.parent.name}s") / path.name
    with pytest.raises(rlx.ConfigError, match=rf"no such file; did you mean '{path.parent.name}/sample\.yaml'"):
        load(wrong)


def test_a_list_instead_of_a_mapping_is_explained(recipe):
    with pytest.raises(rlx.ConfigError, match="a recipe is a mapping"):
        load(recipe("- a\n- b\n"))


# ---- hosts


def test_a_recipe_for_two_hosts_is_read_for_the_one_asked_for(recipe):
    path = recipe(BOTH)
    assert load(path).host == "trl" and load(path).hosts == ("trl", "verl")
    assert load(path).profile("tiny").arguments == {"weight_decay": 0.1}
    assert load(path, host="verl").profile("tiny").arguments == {"trainer.save_freq": 5}


def test_a_host_the_recipe_is_not_for_is_refused(recipe):
    with pytest.raises(rlx.ConfigError, match="the recipe is for host trl, not 'verl'"):
        load(recipe(), host="verl")


def test_arguments_by_host_are_accepted_for_one_host_too(recipe):
    text = BOTH.replace("host: [trl, verl]", "host: verl")
    assert load(recipe(text)).profile("tiny").arguments == {"trainer.save_freq": 5}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("      trl: {a: 1}\n      b: 2\n", r":14: profiles\.tiny\.arguments: 'b' stands beside 'trl'"),
        ("      trl: 3\n", r":14: profiles\.tiny\.arguments: expected a mapping of arguments for each host"),
        ("      weight_decay: 0.1\n", r":14: profiles\.tiny\.arguments: the recipe is for several hosts"),
    ],
)
def test_arguments_of_several_hosts_are_given_by_host(recipe, wrong, message):
    text = BOTH.partition("      trl:")[0] + wrong
    with pytest.raises(rlx.ConfigError, match=message):
        load(recipe(text))


@pytest.mark.parametrize(
    ("host", "changes", "message"),
    [
        ("verl", ("advantage: grpo", "allocator: eepo"), "allocator eepo needs .*'unlearn'"),
        ("trl", ("advantage: grpo", "pruner: april"), "pruner april needs .*generation_chunk=N"),
        ("trl", ("advantage: grpo", "advantage: iapo"), "advantage iapo needs the signal 'direct_user'"),
        ("trl", ("advantage: grpo", "ratio: {name: token, denominator: logp_prox}"), "logp_prox.*prox_decay"),
        ("verl", ("advantage: grpo", "selector: divopd"), "selector divopd needs the signal 'logp_teacher'"),
        ("trl", ("advantage: grpo", "reward: [lead]"), "reward lead shapes reward_components"),
    ],
)
def test_plugins_that_the_host_can_not_carry_are_refused(recipe, host, changes, message):
    text = GOOD.replace("host: trl", f"host: {host}").replace("      weight_decay: 0.1\n", "      {}\n")
    with pytest.raises(rlx.ConfigError, match=rf":6: profile tiny, host {host}: .*{message}"):
        load(recipe(text.replace(*changes)))


def test_settings_supply_what_plugins_need(recipe):
    text = GOOD.replace("advantage: grpo", "pruner: april\n  ratio: {name: token, denominator: logp_prox}")
    load(recipe(text.replace("steps: 3", "steps: 3\n    generation_chunk: 7\n    prox_decay: 0.5")))


def test_signals_of_a_task_of_ones_own_are_taken_on_trust_but_not_the_hosts(recipe):
    text = GOOD.replace("    weights: [1, 0.5]\n", "    task: my.tasks:agent\n")
    text = text.replace("[accuracy, format]", "['my.tasks:reward']")
    load(recipe(text.replace("advantage: grpo", "advantage: iapo")))
    with pytest.raises(rlx.ConfigError, match="logp_prox"):
        load(recipe(text.replace("advantage: grpo", "ratio: {name: token, denominator: logp_prox}")))


@pytest.mark.parametrize(
    ("columns", "message"),
    [("{}", "hint adaprefix reads the column 'solution'.*prompt, answer"), ("{solution: proof}", None)],
)
def test_columns_that_plugins_read_must_be_named(recipe, columns, message):
    text = GOOD.replace("steps: 3", f"task: {{dataset: a.jsonl, columns: {columns}}}")
    path = recipe(text.replace("advantage: grpo", "hint: adaprefix"))
    if message is None:
        load(path)
        return
    with pytest.raises(rlx.ConfigError, match=f":6: profile tiny, host trl: {message}"):
        load(path)


# ---- profiles and overrides


def test_a_profile_changes_the_recipes_plugins(recipe):
    r = load(recipe())
    assert r.plugins["clip"] == {"name": "ppo", "eps_high": 0.28}
    chosen = r.in_profile("tiny")
    assert chosen.plugins["clip"] == {"name": "ppo", "eps_high": 0.28, "eps_low": 0.1}
    assert chosen.in_profile("tiny").plugins == chosen.plugins


def test_overrides_set_plugins_profile_fields_and_the_hosts_arguments(recipe):
    words = ["clip=ppo", "clip.eps_low=0.3", "learning_rate=1e-4", "model=smollm", "rewards=[accuracy]", "weights=[2]"]
    r = with_overrides(load(recipe()), [*words, "adam_beta2=0.9"], "tiny")
    tiny = r.profile("tiny")
    assert r.plugins["clip"] == {"name": "ppo", "eps_low": 0.3}
    assert tiny.arguments == {"weight_decay": 0.1, "adam_beta2": 0.9}
    assert (tiny.model, tiny.rewards, tiny.weights, tiny.learning_rate) == ("smollm", ["accuracy"], [2.0], 1e-4)


@pytest.mark.parametrize(
    ("text", "word", "left"),
    [
        (GOOD.replace("weight_decay: 0.1", "max_steps: 9"), "steps=5", {}),
        (GOOD.replace("weight_decay: 0.1", "beta: 0.1"), "kl_coef=0.2", {}),
        (BOTH.replace("host: [trl, verl]", "host: verl"), "steps=5", {"trainer.save_freq": 5}),
        (
            BOTH.replace("host: [trl, verl]", "host: verl").replace(
                "trainer.save_freq: 5", "data: {train_batch_size: 4}"
            ),
            "prompts_per_step=2",
            {},
        ),
    ],
)
def test_a_setting_on_the_command_line_wins_over_the_files_arguments(recipe, text, word, left):
    changed = with_overrides(load(recipe(text)), [word], "tiny").profile("tiny")
    key, _, value = word.partition("=")
    assert getattr(changed, key) == float(value) and changed.arguments == left


def test_overrides_leave_the_recipe_as_it_was(recipe):
    r = load(recipe())
    with_overrides(r, ["clip.eps_low=0.1", "lr=1", "advantage=none"], "tiny")
    assert r.plugins == {"advantage": "grpo", "clip": {"name": "ppo", "eps_high": 0.28}}
    assert r.profile("tiny").arguments == {"weight_decay": 0.1}


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
        ("steps=-1", "steps=-1: Input should be greater"),
        ("pruner=april", "pruner april needs .*generation_chunk"),
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
