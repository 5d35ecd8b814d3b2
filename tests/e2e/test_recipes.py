"""Recipes trained for two steps, as `rlx run` would: on TRL in this process, on verl in processes of its own.

The nightly ones are two recipes for every kind of plug-in on each host that carries it: `make test-nightly`.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlx_plugins.recipes.run_folder import RunFolder
from rlx_plugins.recipes.runner import run
from rlx_plugins.recipes.schema import load, with_overrides

ROOT = Path(__file__).parents[2]
SMALL = ("steps=2", "prompts_per_step=4")

ON_TRL = {
    "sampler": "vade",
    "allocator": "vigor",
    "hint": "guide",
    "replay": "rollout_replay",
    "pruner that looks at hidden states": "arrol",
    "reward and advantage as one method": "lead",
    "advantage of an agent's turns": "a2tgpo",
    "advantage with a value model": "sao",
    "correction of an engine in FP8": "tis",
    "averaged policy": "ppo_ewma",
    "aggregate": "dr_grpo",
    "selector that cuts rows": "nat_rpc",
    "selector with a teacher": "divopd",
    "ratio": "pnpo",
    "clip of micro scope": "bapo",
    "clip that reads logits": "pdm",
}
ON_VERL = {"allocator and correction": "sol_subset", "reward with facts of the response": "ehpo"}

NIGHTLY = {
    "sampler": ("vade", "vade"),
    "allocator": ("pilot_commit", "aero"),
    "hint": ("adaprefix", "adhint"),
    "replay": ("rollout_replay", "cadence"),
    "pruner": ("april", "copris_is"),
    "reward": ("alp", "hbpo"),
    "advantage": ("gdpo", "echo"),
    "correction": ("mis", "decoupled_ppo"),
    "aggregate": ("asyncweb_norm", "dr_grpo"),
    "selector": ("nat_urs", "bandit_sched"),
    "ratio": ("gspo", "pnpo"),
    "clip": ("sat", "kl_cov"),
    "averaged policy, value model": ("ppo_ewma", "sao"),
}


def train(name: str, host: str, folder: Path) -> list[dict]:
    """The records of a run of two steps, which must have trained something."""
    recipe = with_overrides(load(ROOT / "recipes" / f"{name}.yaml", host=host), SMALL, "tiny")
    summary = run(recipe, RunFolder.open(folder), seed=1)
    records = RunFolder(folder).records()
    assert len(records) == 2 and 0 <= summary["accuracy_after"] <= 1
    losses = [r["loss" if host == "trl" else "actor/pg_loss"] for r in records]
    norms = [r["grad_norm" if host == "trl" else "actor/grad_norm"] for r in records]
    assert all(map(math.isfinite, losses)), losses
    assert max(norms) > 1e-6, norms
    return records


def nightly(host: str) -> list[str]:
    """Recipes of the nightly lane that are for a host."""
    found = dict.fromkeys(name for names in NIGHTLY.values() for name in names)
    return [name for name in found if host in load(ROOT / "recipes" / f"{name}.yaml").hosts]


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("name", ON_TRL.values(), ids=ON_TRL)
def test_a_recipe_trains_on_trl(name, tmp_path):
    pytest.importorskip("trl")
    train(name, "trl", tmp_path)


@pytest.mark.parametrize("name", ON_VERL.values(), ids=ON_VERL)
def test_a_recipe_trains_on_verl(name, tmp_path):
    pytest.importorskip("verl")
    train(name, "verl", tmp_path)


def test_the_fp8_engine_gives_corrections_something_to_correct(tmp_path):
    pytest.importorskip("trl")
    records = train("mis", "trl", tmp_path)
    assert all(r["rlx/sampling/kl"] > 1e-5 for r in records)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("name", nightly("trl"))
def test_two_recipes_of_every_kind_train_on_trl(name, tmp_path):
    pytest.importorskip("trl")
    train(name, "trl", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", nightly("verl"))
def test_two_recipes_of_every_kind_train_on_verl(name, tmp_path):
    pytest.importorskip("verl")
    train(name, "verl", tmp_path)
