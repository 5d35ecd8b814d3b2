"""What we rely on in TRL: a new version that changes it fails here, naming the seam."""

from __future__ import annotations

import pytest

from rlx_plugins.hosts.trl import seams


def test_the_installed_trl_has_every_seam():
    assert seams.check_seams() == []


@pytest.mark.parametrize(
    ("table", "path", "change", "message"),
    [
        ("PARAMETERS", "trl.GRPOTrainer._compute_loss", "self model inputs num_items", "takes (self, model, inputs)"),
        ("ATTRIBUTES", "trl.GRPOTrainer", "eos_token_ids gone", "no longer sets .gone"),
        ("MENTIONS", "trl.GRPOTrainer._prepare_inputs", "self.gone(", "no longer contains self.gone("),
        ("PARAMETERS", "trl.GRPOTrainer._gone", "self", "_gone is gone"),
    ],
)
def test_a_changed_seam_is_named_with_trls_version(monkeypatch, table, path, change, message):
    monkeypatch.setitem(getattr(seams, table), path, change)
    (problem,) = seams.check_seams()
    assert problem.startswith("trl 1.16") and path in problem and message in problem
