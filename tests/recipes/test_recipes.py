"""The recipes of this repository: each is whole, fits its hosts, and every built-in method has one."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlx_plugins.core.config import OPTIONS, expand, specs
from rlx_plugins.core.kinds import ALIASES, DEFAULTS, KINDS
from rlx_plugins.core.registry import names
from rlx_plugins.recipes.documents import read_document
from rlx_plugins.recipes.schema import load

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "recipes").glob("*.yaml"))
NAMES = [path.stem for path in FILES]
QUICKSTARTS = {"quickstart", "quickstart-verl"}

WITHOUT_RECIPE = {
    ("sampler", "in_order"): "the order of the dataset: what hosts do without a sampler",
    ("allocator", "elpo"): "needs a host whose rollout program calls tools; the table host alone does",
    ("allocator", "eepo"): "needs a host that unlearns sampling weights; the table host alone does",
    ("method", "eepo"): "see its allocator",
    ("aggregate", "bnpo"): "TRL's loss_type of that name, to compare with",
    ("aggregate", "seq_mean_token_sum"): "verl's loss_agg_mode of that name, to compare with",
    ("aggregate", "token_sum"): "verl's loss_agg_mode of that name, to compare with",
}
"""Built-in methods that no recipe names, and why."""

TOLD = {
    "prompts_per_step": "prompts per step",
    "group_size": "group size",
    "max_response_length": "response length",
    "learning_rate": "learning rate",
    "steps": "steps",
}
"""Settings of a paper -> how its notes speak of those it does not state."""


VERL = (
    *("grpo", "gdpo", "gspo", "bapo", "sao", "tis", "ppo_ewma", "ehpo", "nat_rpc", "asyncweb_norm", "vade", "vigor"),
    *("guide", "april", "rollout_replay", "sol_subset", "quickstart-verl"),
)
"""Recipes whose verl configuration is composed in full: every kind, and every setting of a profile."""


@functools.cache
def recipe_of(name, host=None):
    return load(ROOT / "recipes" / f"{name}.yaml", host=host)


def used(recipe):
    """(kind, name) of every plug-in of a recipe, in both profiles, methods and what they stand for."""
    for profile in recipe.profiles:
        plugins = recipe.in_profile(profile).plugins
        for key, value in [*plugins.items(), *expand(plugins).items()]:
            for spec in specs(key, value) if key not in OPTIONS and value is not None else ():
                yield ALIASES.get(key, key), spec["name"]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_whole(name):
    recipe = recipe_of(name)
    assert recipe.name == name and recipe.title and recipe.papers
    if name not in QUICKSTARTS:
        assert set(recipe.profiles) == {"tiny", "paper"}
        assert recipe.profile("tiny").model == "tiny" and "tiny" in recipe.profile("tiny").task


@pytest.mark.parametrize("name", sorted(set(NAMES) - QUICKSTARTS))
def test_the_notes_say_what_the_paper_does_not_state(name):
    own = read_document(ROOT / "recipes" / f"{name}.yaml")
    paper = recipe_of(name).profile("paper")
    told = paper.notes.partition("Not stated, host default:")[2]
    for setting, words in TOLD.items():
        stated = own.place("profiles", "paper", setting).file == own.path and setting in own.data["profiles"]["paper"]
        assert stated != (words in told), f"{setting}: {paper.notes}"


def test_every_built_in_method_has_a_recipe_or_a_reason_for_none():
    have = {pair for name in NAMES for pair in used(recipe_of(name))} | set(DEFAULTS.items())
    built_in = {(kind, name) for kind in KINDS for name in names(kind)}
    missing = built_in - have - set(WITHOUT_RECIPE)
    assert not missing, f"no recipe in recipes/ names {sorted(missing)}: add one, or a reason to WITHOUT_RECIPE"
    assert not set(WITHOUT_RECIPE) & have, "a method of WITHOUT_RECIPE has got a recipe: remove it there"
    assert set(WITHOUT_RECIPE) <= built_in


def test_all_recipes_are_checked_in_seconds_without_a_host():
    code = (
        "import sys; from rlx_plugins.cli import main; sys.argv = ['rlx', 'check', 'recipes']\n"
        "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
        "bad = {'trl', 'verl', 'vllm', 'transformers', 'ray'} & set(sys.modules); assert not bad, bad"
    )
    began = time.process_time()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)
    assert time.process_time() - began < 30


# ---- what the hosts themselves say, short of loading a model


@pytest.fixture(scope="module")
def rows():
    pytest.importorskip("reasoning_gym")
    from rlx_plugins.testing.tiny_tasks import COLUMNS, tiny_dataset

    data = tiny_dataset("train", 8)
    assert set(data.column_names) == set(COLUMNS)
    return data


@pytest.mark.parametrize("name", [n for n in NAMES if "trl" in recipe_of(n).hosts])
def test_trl_takes_the_tiny_profile(name, rows, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    from rlx_plugins.core.config import build
    from rlx_plugins.hosts.trl import run as trl_run
    from rlx_plugins.hosts.trl.config import check_options, check_saving
    from rlx_plugins.hosts.trl.profile import host_profile
    from rlx_plugins.recipes.run_folder import RunFolder
    from rlx_plugins.recipes.task import TINY_TASKS

    monkeypatch.setattr(trl_run, "load_model_path", lambda name: name)
    recipe = recipe_of(name, "trl").in_profile("tiny")
    profile = recipe.profile("tiny")
    args = trl_run.make_config(recipe, profile, RunFolder(tmp_path), seed=0)
    own = TINY_TASKS[profile.task] is not None
    parts = build(recipe.plugins, host_profile(args, dataset=rows, own_rollouts=own))
    check_options(args, parts, own_rollouts=own, dataset=rows)
    check_saving(args, args.save_steps)


@pytest.mark.parametrize("name", [n for n in NAMES if "trl" in recipe_of(n).hosts and n not in QUICKSTARTS])
def test_trl_knows_the_arguments_of_the_paper_profile(name, monkeypatch):
    pytest.importorskip("trl")
    from rlx_plugins.hosts.trl import run as trl_run
    from rlx_plugins.hosts.trl.config import RLXConfig

    monkeypatch.setattr(trl_run, "load_model_path", lambda name: name)
    monkeypatch.setenv("WORLD_SIZE", "8")
    paper = recipe_of(name, "trl").profile("paper")
    arguments = trl_run.setting_arguments(paper) | paper.arguments
    assert set(arguments) <= set(RLXConfig.__dataclass_fields__)


@pytest.mark.parametrize("name", VERL)
def test_verl_takes_the_tiny_profile(name, tmp_path, monkeypatch):
    command = verl_command(name, "tiny", tmp_path, monkeypatch)
    from rlx_plugins.hosts.verl import settings

    parts = settings.make_parts(composed(command))
    named = expand(recipe_of(name, "verl").in_profile("tiny").plugins)
    assert {kind for kind, value in named.items() if value is not None} <= {kind for kind in KINDS if parts[kind]}


@pytest.mark.parametrize("name", ["bapo", "adaprefix", "sao", "hbpo"])
def test_verl_takes_the_paper_profile(name, tmp_path, monkeypatch):
    from rlx_plugins.hosts.verl import run as verl_run

    monkeypatch.setattr(verl_run, "task_files", lambda profile, seed: (tmp_path / "train.parquet", None))
    monkeypatch.setattr("rlx_plugins.hosts.verl.settings.check_engine", lambda config: None)
    config = composed(verl_command(name, "paper", tmp_path, monkeypatch))
    paper = recipe_of(name, "verl").profile("paper")
    assert config.actor_rollout_ref.model.path == paper.model and config.actor_rollout_ref.rollout.name == "vllm"
    assert config.actor_rollout_ref.rollout.n == paper.group_size and config.trainer.val_before_train is False


def test_the_defaults_that_checks_assume_of_verl_are_verls():
    pytest.importorskip("verl")
    from types import SimpleNamespace

    from rlx_plugins.hosts.verl.profile import host_profile
    from rlx_plugins.recipes.fit import _verl
    from rlx_plugins.recipes.schema import Profile

    config = composed(SimpleNamespace(overrides=[]))
    theirs = host_profile(config, config.trainer.v1.trainer_mode)
    ours = _verl(Profile(task="my.tasks:task"))
    assert (ours.signals, ours.capabilities) == (theirs.signals, theirs.capabilities)


def verl_command(name, profile, folder, monkeypatch):
    pytest.importorskip("verl")
    pytest.importorskip("reasoning_gym")
    from rlx_plugins.hosts.verl import run as verl_run
    from rlx_plugins.recipes.run_folder import RunFolder

    monkeypatch.setattr(verl_run, "load_model_path", lambda name: name)
    recipe = recipe_of(name, "verl").in_profile(profile)
    return verl_run.make_command(
        recipe, recipe.profile(profile), RunFolder(folder), seed=0, resume=False, tiny=profile == "tiny"
    )


def composed(command):
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_module("rlx_plugins.hosts.verl.config", version_base=None):
        return compose("rlx_trainer", [o for o in command.overrides if not o.startswith("hydra.")])
