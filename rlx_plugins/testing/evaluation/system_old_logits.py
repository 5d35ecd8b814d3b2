"""Function form of the exact ways to missing old log-probs."""

from __future__ import annotations

from typing import Any

import torch

from ...hosts.old_logits import StepTime, available, old_logits, versions_in
from .building import tensor


def old_logits_form(
    token_version=None,
    response_mask=None,
    logp_table=None,
    current_version=None,
    strategy="snapshot",
    keep=8,
    switch_cost=7.0,
    forward_cost=1.0,
    train_cost=10.0,
    gpu_split=0.25,
    pause_cost=2.0,
    staleness=None,
) -> dict[str, Any]:
    """`logp_table` [V,B,T]: what each version's forward pass gives; current_version - token_version as `staleness`."""
    if token_version is None:
        token_version = current_version - tensor(staleness, torch.int64)
    version = tensor(token_version, torch.int64)
    mask, table = tensor(response_mask).bool(), tensor(logp_table)
    scored = available(versions_in(version, mask, current_version), current_version, strategy, keep)
    found = old_logits(version, mask, scored, lambda v: table[v])
    cost = StepTime(switch_cost, forward_cost, train_cost, gpu_split, pause_cost)
    return {
        "logp_old": found.logp,
        "exact": found.exact.long(),
        "missing": found.missing,
        "step_time": cost.of(strategy, scored, current_version),
        "stored_copies": 0 if strategy == "interrupt" else keep,
        "versions_needed": scored,
    }


FORMS = {"old_logits": old_logits_form}
