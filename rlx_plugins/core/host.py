"""What a host can supply and do, in one object: the checks of a configuration read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BATCH_SIGNALS = frozenset(
    "response_mask response_ids group rewards row_id keep finished temperature propensity prompt_key".split()
)
"""Columns every host gives every batch; a plug-in need not list them in `requires`."""

TOKEN_SIGNALS = frozenset(
    "hint_mask turn_ids segment_ids values confidence token_rewards boundary_mask decision_mask role_ids node_ids"
    " logp_teacher rollout_top_ids rollout_top_logp".split()
)
"""Signals users may supply that hold one entry per response token; a plug-in adds its own in `token_signals`."""

CAPABILITIES = {
    "rounds": "several rounds of generation in one step",
    "until_group": "hand groups back as they finish",
    "pause": "hand rows back at a response length",
    "continue": "go on from given response tokens",
    "context": "sample with extra prompt tokens that training omits",
    "row_temperature": "a sampling temperature per row",
    "abort": "stop rows in flight, keeping their tokens",
    "tools": "call tools inside the rollouts of the program",
    "ban_tokens": "forbid tokens where a rollout is continued",
    "unlearn": "sample from a copy of the weights that has taken a step away from given rollouts",
    "forward:logp": "log-probabilities under the current policy during the rollout",
    "forward:entropy": "the policy's entropy at each response token during the rollout",
    "forward:hidden": "hidden states during the rollout",
    "forward:prompt_entropy": "entropy of prompts during the rollout",
    "choose_prompts": "start prompts a sampler names",
    "logits": "logits of the policy in the loss",
    "teacher_logits": "logits of a teacher in the loss",
    "cut_rows": "shorten rows before the training forward",
    "reset_prox": "start the averaged policy behind logp_prox anew when a part asks for it",
    "engine_patch": "change the engine's model or scheduler",
}
"""Capability -> what it means; `Plugin.capabilities` and `HostProfile.capabilities` use these names."""


@dataclass(frozen=True)
class HostProfile:
    """A host in one configuration.

    name          "trl", "verl", "table"
    signals       columns it supplies beyond BATCH_SIGNALS as it is configured now
    capabilities  what it can do as it is configured now, from CAPABILITIES
    remedies      signal or capability -> the option that would supply it, or why nothing does
    default_remedy  what to do about any other
    """

    name: str
    signals: frozenset[str] = frozenset()
    capabilities: frozenset[str] = frozenset()
    remedies: Mapping[str, str] = field(default_factory=dict)
    default_remedy: str = ""

    def remedy(self, missing: str) -> str:
        """What to do about a missing signal or capability, as the end of an error message."""
        return self.remedies.get(missing) or self.default_remedy or f"no option of host {self.name} supplies it"
