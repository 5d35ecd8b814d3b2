"""What the simulated host supplies and can do: everything but changing a real engine."""

from __future__ import annotations

from ...core.host import CAPABILITIES as ALL
from ...core.host import HostProfile

CAPABILITIES = frozenset(ALL) - {"engine_patch"}

SIGNALS = frozenset(
    "logp_new logp_old logp_rollout logp_behavior logp_ref logp_teacher logp_prox entropy staleness reward_components"
    " component_names hint_mask turn_ids segment_ids helped source correct prompt_ids rollout values"
    " rollout_top_ids rollout_top_logp".split()
)
"""Beside these, the dataset's columns."""

PROFILE = HostProfile(
    name="table",
    signals=SIGNALS,
    capabilities=CAPABILITIES,
    remedies={"engine_patch": "the table host samples from a table and has no engine to patch; use host trl or verl"},
)
