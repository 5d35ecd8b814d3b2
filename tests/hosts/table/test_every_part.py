"""Every built-in plug-in trains on the table host, and a run with it can be killed and resumed."""

import math

import pytest
import torch

from rlx_plugins.core.kinds import KINDS
from rlx_plugins.core.registry import builtin_names, create
from rlx_plugins.hosts.table import CALL, GOOD, TableHost, TableTrainer
from rlx_plugins.hosts.table.facts import FACTS

NO_NETWORK = {"drafter", "quant"}

FIELDS = {
    "critical_turn": lambda r: float(r.slot % 3 - 1),
    "confidence": lambda r: [1 / (2 + token) for token in r.tokens],
    "info_gain": lambda r: [0.1 * r.slot - 0.05 * t for t in range(r.tokens.count(CALL))],
    "support_edges": lambda r: [[0, 1]] if CALL in r.tokens else [],
    "failed_edges": lambda r: [[0, 1]] if r.slot % 2 else None,
    "error": lambda r: [r.slot % 2, 0],
    "direct_user": lambda r: [1, 0],
    "budget": lambda r: 3 + 3 * (r.slot % 2),
    "external": lambda r: r.slot % 4 == 3,
    "predicted": lambda r: float(r.tokens.count(GOOD)),
    "target": lambda r: 3.0,
    "twin_rewards": lambda r: float("nan") if len(r) < 3 else float(r.slot % 2),
}
"""What rollout code would return beside the tokens, for the parts that read it."""

SETTINGS = {
    ("advantage", "resum"): {"advantage": {"name": "resum", "phrase": [CALL]}},
    ("advantage", "rtmc"): {"advantage": {"name": "rtmc", "signatures": "turns"}},
    ("advantage", "v05"): {"advantage": {"name": "v05", "prior": "prior", "reward_min": 0}},
    ("aggregate", "datpo"): {"advantage": "datpo"},
    ("clip", "a2tgpo"): {"advantage": "a2tgpo"},
    ("method", "a2tgpo"): {"method": {"name": "a2tgpo", "column": "solution"}},
    ("advantage", "adhint"): {"hint": "guide"},
    ("advantage", "hbpo"): {"reward": {"name": "hbpo", "max_length": 16}},
    ("advantage", "sd_grpo"): {
        "advantage": {"name": "sd_grpo", "segment_weights": [{"brief": 1}, {"correct": 1}], "boundary_tokens": [CALL]}
    },
    ("clip", "hapo"): {"advantage": "hapo"},
    ("method", "adhint"): {"hint": "guide"},
    ("advantage", "lead"): {"reward": "lead"},
    ("reward", "lead"): {"advantage": "lead"},
    ("reward", "smith"): {"advantage": "gdpo"},
    ("clip", "dro"): {"clip": {"name": "dro", "penalty_coef": 1.0}},
}
"""What a part can't run without."""

PARTS = [(kind, name) for kind in KINDS if kind not in NO_NETWORK for name in sorted(builtin_names(kind))]


def trainer(kind, name):
    config = {kind: name} | SETTINGS.get((kind, name), {})
    host = TableHost(24, turns=2, fields=FIELDS | FACTS)
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
