"""Every built-in plug-in trains on the table host, and a run with it can be killed and resumed."""

import math

import pytest
import torch

from rlx_plugins.core.kinds import KINDS
from rlx_plugins.core.registry import builtin_names, create
from rlx_plugins.hosts.table import TableTrainer
from rlx_plugins.testing.conformance.rollout import difference_of_runs, interrupted
from rlx_plugins.testing.conformance.setting import NO_NETWORK, Setting

PARTS = [(kind, name) for kind in KINDS if kind not in NO_NETWORK for name in sorted(builtin_names(kind))]


@pytest.mark.parametrize(("kind", "name"), PARTS, ids=[f"{kind}-{name}" for kind, name in PARTS])
def test_it_trains_and_a_killed_run_resumed_is_the_run(kind, name):
    whole, resumed = interrupted(Setting.of(kind, name).trainer, before=2, after=2)
    assert all(math.isfinite(entry["loss"]) for entry in whole.log)
    assert bool(torch.isfinite(whole.host.policy.theta).all())
    assert difference_of_runs(resumed, whole, steps=2) is None


@pytest.mark.parametrize("kind", sorted(NO_NETWORK))
def test_parts_of_an_engine_or_a_network_are_refused(kind):
    for name in sorted(builtin_names(kind)):
        with pytest.raises(ValueError, match="use host trl or verl"):
            TableTrainer({kind: create(kind, name)})
