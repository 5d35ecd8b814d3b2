"""Every seam of verl, TransferQueue and Ray that is used; a new version that changes one fails here by name."""

from __future__ import annotations

import pytest

from rlx_plugins.hosts import contracts
from rlx_plugins.hosts.verl import seams


def test_the_installed_versions_have_every_seam():
    assert seams.check_seams() == []


@pytest.mark.parametrize(
    ("check", "wanted", "message"),
    [
        (contracts.check_parameters, {"verl.utils.metric.reduce_metrics": "metrics how"}, r"takes \(metrics\)"),
        (contracts.check_parameters, {"verl.utils.metric.reduced": "metrics"}, "is gone"),
        (
            contracts.check_mentions,
            {"verl.trainer.ppo.v1.trainer_base.PPOTrainer._step_once": "self._balance_batches("},
            "no longer contains self._balance_batches",
        ),
        (
            contracts.check_attributes,
            {"verl.trainer.ppo.v1.trainer_base.PPOTrainer": "replay_buffers"},
            "no longer sets .replay_buffers",
        ),
    ],
)
def test_a_changed_seam_is_named_with_the_version(check, wanted, message):
    import re

    (problem,) = check(wanted)
    (path,) = wanted
    assert re.match(rf"verl 0\.9\.\d+: {re.escape(path)} ", problem) and re.search(message, problem)


def test_a_configuration_entry_that_is_gone_is_named(monkeypatch):
    monkeypatch.setattr(seams, "CONFIG", ("algorithm.adv_estimators",))
    (problem,) = seams._config_problems()
    assert problem.endswith("its configuration has no algorithm.adv_estimators")
