"""Random combinations of built-ins of several kinds: they train, and each of them does something or says why not."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rlx_plugins.core.errors import ConfigError
from rlx_plugins.core.kinds import KINDS
from rlx_plugins.core.registry import builtin_names
from rlx_plugins.testing.conformance.setting import NO_NETWORK, SETTINGS, table_trainer

DRAWN = [kind for kind in KINDS if kind not in NO_NETWORK and builtin_names(kind)]
THE_SAME = {
    ("sampler", "in_order"): "the order in which the host offers prompts",
    ("ratio", "token"): "its denominator is another policy only on rows that name one",
    ("aggregate", "datpo"): "token_mean where forks train a shared prefix once",
    **dict.fromkeys([("advantage", "arpo"), ("advantage", "datpo"), ("advantage", "elpo")], "grpo without forks"),
}
"""Parts that may change nothing by what they are."""


def combination(seed):
    """Two to five kinds with a built-in each, and what those can't run without; redrawn until the frame accepts it."""
    draw = random.Random(seed)
    while True:
        config = {}
        for kind in draw.sample(DRAWN, draw.randint(2, 5)):
            name = draw.choice(sorted(builtin_names(kind)))
            config = {kind: name, **SETTINGS.get((kind, name), {}), **config}
        try:
            table_trainer(config)
        except ConfigError:
            continue
        return config


def name(spec):
    return spec if isinstance(spec, str) else spec["name"]


def words(config):
    return " ".join(f"{kind}={name(spec)}" for kind, spec in config.items())


@pytest.mark.parametrize("config", [combination(seed) for seed in range(40)], ids=words)
def test_a_combination_trains_and_each_of_its_parts_does_something(config):
    whole = table_trainer(config)
    whole.run()
    assert all(math.isfinite(entry["loss"]) for entry in whole.log)
    assert bool(torch.isfinite(whole.host.policy.theta).all())
    for kind, spec in config.items():
        try:
            without = table_trainer({k: v for k, v in config.items() if k != kind})
        except ConfigError:
            continue  # the others need it
        changed = {key for key, parameters in parts(whole).items() if parts(without).get(key) != parameters}
        if changed <= set(THE_SAME):
            continue
        without.run()
        told = any(logs(whole, part) for part, _ in changed)
        assert differ(whole, without) or told, f"{kind} {spec} changes nothing and says nothing"


def parts(run):
    return {(part.kind, part.name): part.params() for part in run.parts}


def differ(run, other):
    """Whether two runs end with different weights, or generated or trained something else."""
    return not torch.equal(run.host.policy.theta, other.host.policy.theta) or any(
        a["generated"] != b["generated"] or a["rows"] != b["rows"] for a, b in zip(run.log, other.log)
    )


def logs(run, kind):
    """Whether the parts of a kind reported what they did."""
    return any(metric.startswith(f"{kind}/") for entry in run.log for metric in entry)
