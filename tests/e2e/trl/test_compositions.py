"""Random combinations of built-ins train the tiny lane on TRL, and each of their parts does something."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from rlx_plugins.core.config import build
from rlx_plugins.core.errors import ConfigError
from rlx_plugins.core.kinds import ALIASES, KINDS
from rlx_plugins.core.registry import builtin_names
from rlx_plugins.hosts.trl import RLXConfig, RLXTrainer
from rlx_plugins.hosts.trl.config import check_options
from rlx_plugins.hosts.trl.profile import host_profile
from rlx_plugins.testing.conformance.setting import SETTINGS
from rlx_plugins.testing.tiny_model import tiny_model_path
from rlx_plugins.testing.tiny_tasks import (
    FACTS,
    accuracy_reward,
    brevity_reward,
    format_reward,
    tiny_dataset,
    tiny_grpo_args,
)

DRAWN = [kind for kind in KINDS if kind not in ALIASES and builtin_names(kind)]
THE_SAME = {
    ("sampler", "in_order"),  # the order in which the host offers prompts
    ("aggregate", "datpo"),  # token_mean where forks train a shared prefix once
    ("advantage", "arpo"),  # these three are grpo where no rollout was forked
    ("advantage", "datpo"),
    ("advantage", "elpo"),
}
"""Parts that may change nothing by what they are."""


@pytest.fixture(scope="module")
def prompts():
    return tiny_dataset(size=64)


def arguments(folder, plugins):
    """Two steps of two updates on four prompts, with what a host can offer switched on."""
    settings = {
        "output_dir": str(folder),
        "max_steps": 4,
        "num_iterations": 2,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "learning_rate": 1e-3,
        "warmup_steps": 0,
        "generation_chunk": 5,
        "beta": 0.01,
        "prox_decay": 0.9,
        "teacher_model": "policy",
        "value_model": "rlx_plugins.testing.tiny_agent:working_values",
        "rollout_signals": list(FACTS),
        "disable_tqdm": True,
        "seed": 3,
    }
    return RLXConfig(**tiny_grpo_args(**settings), plugins=plugins)


def combination(seed, folder, dataset):
    """Two to four kinds with a built-in each; redrawn until TRL can run it."""
    draw = random.Random(seed)
    while True:
        plugins = {}
        for kind in draw.sample(DRAWN, draw.randint(2, 4)):
            name = draw.choice(sorted(builtin_names(kind)))
            beside = SETTINGS.get((kind, name), {})
            tabular = any(word in json.dumps(beside) for word in ("phrase", "column"))  # tokens of the table host
            plugins = {kind: name, **({} if tabular else beside), **plugins}
        try:
            args = arguments(folder, plugins)
            parts = build(plugins, host_profile(args, dataset=dataset))
            check_options(args, parts, own_rollouts=False, dataset=dataset)
        except ConfigError:
            continue
        return plugins


def trained(plugins, folder, dataset):
    trainer = RLXTrainer(
        model=str(tiny_model_path()),
        reward_funcs=[accuracy_reward, format_reward, brevity_reward],
        args=arguments(folder, plugins),
        train_dataset=dataset,
    )
    trainer.train()
    return trainer


def steps(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


def parts(trainer):
    return {(part.kind, part.name): part.params() for part in trainer.parts}


def differ(one, other):
    """Whether two runs end with different weights."""
    return any(not torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(6))
def test_a_combination_trains_and_each_of_its_parts_does_something(seed, prompts, tmp_path):
    plugins = combination(seed, tmp_path, prompts)
    whole = trained(plugins, tmp_path, prompts)
    assert len(steps(whole)) == 4 and all(math.isfinite(row["loss"]) for row in steps(whole))
    assert all(bool(torch.isfinite(weight).all()) for weight in whole.model.parameters())
    for kind in plugins:
        rest = {k: v for k, v in plugins.items() if k != kind}
        try:
            without = trained(rest or {"clip": "ppo"}, tmp_path, prompts)
        except ConfigError:
            continue  # the others need it
        changed = {key for key, parameters in parts(whole).items() if parts(without).get(key) != parameters}
        if changed <= THE_SAME:
            continue
        told = any(f"rlx/{part}/" in metric for row in steps(whole) for metric in row for part, _ in changed)
        assert differ(whole, without) or told, f"{kind} {plugins[kind]} changes nothing and says nothing"
