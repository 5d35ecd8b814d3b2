"""Every built-in plug-in trains on the table host, and a run with it can be killed and resumed."""

import math

import pytest
import torch

from rlx_plugins.core.kinds import KINDS
from rlx_plugins.core.registry import builtin_names, create
from rlx_plugins.hosts.table import TableHost, TableTrainer

NO_NETWORK = {"drafter", "quant"}

SETTINGS = {
    ("advantage", "lead"): {"reward": "lead"},
    ("reward", "lead"): {"advantage": "lead"},
    ("clip", "dro"): {"clip": {"name": "dro", "penalty_coef": 1.0}},
}
"""What a part can't run without."""

PARTS = [(kind, name) for kind in KINDS if kind not in NO_NETWORK for name in sorted(builtin_names(kind))]


def trainer(kind, name):
    config = {kind: name} | SETTINGS.get((kind, name), {})
    host = TableHost(24, turns=2)
    return TableTrainer(
        config, host=host, groups=3, group_size=4, max_tokens=8, total_steps=4, micro_batches=2, epochs=2
    )


@pytest.mark.parametrize(("kind", "name"), PARTS, ids=[f"{kind}-{name}" for kind, name in PARTS])
def test_it_trains_and_a_killed_run_resumed_is_the_run(kind, name, tmp_path):
    whole = trainer(kind, name)
    whole.run(2)
    torch.save(whole.state_dict(), tmp_path / "checkpoint.pt")
    whole.run(2)
    assert all(math.isfinite(entry["loss"]) for entry in whole.log)
    assert bool(torch.isfinite(whole.host.policy.theta).all())

    resumed = trainer(kind, name)
    resumed.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    resumed.run(2)
    assert [comparable(entry) for entry in resumed.log] == [comparable(entry) for entry in whole.log[2:]]
    assert torch.equal(resumed.host.policy.theta, whole.host.policy.theta)


def comparable(entry):
    return {name: "nan" if isinstance(value, float) and math.isnan(value) else value for name, value in entry.items()}


@pytest.mark.parametrize("kind", sorted(NO_NETWORK))
def test_parts_of_an_engine_or_a_network_are_refused(kind):
    for name in sorted(builtin_names(kind)):
        with pytest.raises(ValueError, match="use host trl or verl"):
            TableTrainer({kind: create(kind, name)})
