"""A recipe for host verl as a verl command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

import rlx_plugins as rlx
from rlx_plugins.hosts.verl import settings
from rlx_plugins.hosts.verl.run import Records, counted_before, flatten, hydra_value, make_command, plugin_overrides
from rlx_plugins.recipes.run_folder import RunFolder
from rlx_plugins.recipes.runner import command_text
from rlx_plugins.recipes.schema import load, with_overrides

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture
def recipe():
    return load(RECIPES / "quickstart-verl.yaml")


def composed(command):
    GlobalHydra.instance().clear()
    with initialize_config_module("rlx_plugins.hosts.verl.config", version_base=None):
        return compose("rlx_trainer", [o for o in command.overrides if not o.startswith("hydra.")])


def test_the_quickstart_is_a_configuration_verl_accepts(recipe, tmp_path):
    command = make_command(recipe, recipe.profile("tiny"), RunFolder(tmp_path), seed=3, resume=False, tiny=True)
    config = composed(command)
    parts = settings.make_parts(config)
    assert (parts.one("advantage").name, parts.one("clip").name) == ("dvao", "bapo")
    assert parts.one("reward").length_unit == 20 and config.rlx.seed == config.data.seed == 3
    kwargs = config.reward.custom_reward_function.reward_kwargs
    assert kwargs == {"accuracy": 1.0, "format": 0.25, "brevity": 0.0}
    assert config.trainer.default_local_dir == str(tmp_path / "checkpoints")
    assert command.environment["VERL_PLATFORM"] == "cpu"
    assert command.value("trainer.total_training_steps") == "60" and command.value("trainer.nothing") is None


def test_words_of_the_command_line_change_the_recipe(recipe, tmp_path):
    words = ["clip.target=0.5", "reward=none", "arguments.data.train_batch_size=4", "plugins=none", "clip=sapo"]
    changed = with_overrides(recipe, words, "tiny")
    command = make_command(changed, changed.profile("tiny"), RunFolder(tmp_path), seed=0, resume=True, tiny=True)
    config = composed(command)
    assert settings.read_plugins(config) == {"clip": "sapo"}
    assert config.data.train_batch_size == 4 and config.trainer.resume_mode == "auto"


def test_print_shows_a_command_for_the_shell(recipe, tmp_path):
    text = command_text(recipe, RunFolder(tmp_path))
    assert "python -m rlx_plugins.hosts.verl" in text and "\n  +rlx.plugins.clip=bapo" in text
    assert not list(tmp_path.iterdir())
    with pytest.raises(rlx.ConfigError, match="host trl runs in this process"):
        command_text(recipe.model_copy(update={"host": "trl"}), RunFolder(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": ["acuracy"]}, "did you mean 'accuracy'"),
        ({"rewards": ["m:f", "m:g"]}, "one package.module:function"),
        ({"task": "tinny"}, "unknown task 'tinny'"),
        ({"task": "os:getcwd"}, "returns {'train': path, 'eval': path}"),
    ],
)
def test_what_verl_can_not_run_is_refused(recipe, tmp_path, changes, message):
    profile = recipe.profile("tiny").model_copy(update={"weights": None, **changes})
    with pytest.raises(rlx.ConfigError, match=message):
        make_command(recipe, profile, RunFolder(tmp_path), seed=0, resume=False, tiny=True)


@pytest.mark.parametrize("value", [None, True, 3, -0.5, "bapo", "a b=c", 'a"b', "null", [1, "x y"], {"a": [None, 2.5]}])
def test_values_survive_hydras_grammar(value):
    (override,) = OverridesParser.create().parse_overrides([f"+key={hydra_value(value)}"])
    assert override.value() == value


def test_arguments_may_be_nested_or_dotted():
    nested = {"data": {"train_batch_size": 8}, "trainer.v1.trainer_mode": "rlx_sync"}
    assert flatten(nested) == {"data.train_batch_size": 8, "trainer.v1.trainer_mode": "rlx_sync"}


def test_chains_and_options_of_the_grammar_become_overrides():
    plugins = {"reward": ["alp", {"name": "lead", "decay": 0.5}], "baseline": "all", "clip": {"name": "bapo"}}
    assert plugin_overrides(plugins) == [
        "+rlx.plugins.reward=[alp,{name:lead,decay:0.5}]",
        "+rlx.plugins.baseline=all",
        "+rlx.plugins.clip=bapo",
    ]


def test_verls_metrics_become_records_of_the_run(tmp_path):
    file = tmp_path / "verl.jsonl"
    step = {"critic/score/mean": 0.5, "response_length/mean": 7.0, "rlx/generated_tokens": 100.0}
    lines = [
        {"step": 0, "data": {"val-aux/rlx_tiny/accuracy/mean@1": 0.25}},
        {"step": 1, "data": step},
        {"step": 2, "data": {**step, "val-aux/rlx_tiny/accuracy/mean@1": 0.75}},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3, "da')
    folder, seen = RunFolder(tmp_path), []
    records = Records(folder, seen.append, max_steps=2, tokens=50, seconds=1.0)
    records.read(file)
    records.read(file)
    assert [r["generated_tokens"] for r in folder.records()] == [150, 250] and len(seen) == 2
    assert records.accuracy == {"accuracy_before": 0.25, "accuracy_after": 0.75}


def test_tokens_of_updates_are_added_up_and_responses_are_told_from_prompts(tmp_path):
    file = tmp_path / "verl.jsonl"
    plain = {"critic/score/mean": 0.5, "perf/total_num_tokens": 300, "prompt_length/mean": 10.0}
    plain |= {"response_length/mean": 20.0}
    lines = [{"step": n, "data": {**plain, "rlx/update_tokens": 40.0} if n > 1 else plain} for n in (1, 2, 3)]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    folder = RunFolder(tmp_path)
    Records(folder, None, max_steps=3, tokens=0, seconds=0.0, update_tokens=100).read(file)
    assert [r["generated_tokens"] for r in folder.records()] == [200, 400, 600]
    assert [r["update_tokens"] for r in folder.records()] == [None, 140, 180]


def test_a_resumed_run_counts_on_from_its_checkpoint(tmp_path):
    folder = RunFolder(tmp_path)
    assert counted_before(folder) == {}
    for step in (1, 2, 3):
        folder.log({"step": step, "generated_tokens": 10 * step})
    folder.checkpoints.mkdir()
    (folder.checkpoints / "latest_checkpointed_iteration.txt").write_text("2")
    assert counted_before(folder)["generated_tokens"] == 20
