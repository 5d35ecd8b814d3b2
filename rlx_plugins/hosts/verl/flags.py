"""Single methods by verl's own flags, with verl's stock trainers.

    algorithm.adv_estimator=rlx.gapo_snr                          parameters: +algorithm.rlx.<parameter>=...
    actor_rollout_ref.actor.policy_loss.loss_mode=rlx.bapo        parameters:
        actor_rollout_ref.actor.policy_loss._target_=rlx_plugins.hosts.verl.flags.RLXPolicyLossConfig
        +actor_rollout_ref.actor.policy_loss.params.<parameter>=...

verl hands an estimator rewards, mask and groups, and a policy loss log-probs, advantages and mask. What a method needs
beyond is refused, with the trainer mode as the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss
from verl.workers.config import PolicyLossConfig

from ...core.batch import RolloutBatch
from ...core.config import Parts, build, check_host
from ...core.errors import ConfigError, MissingSignal
from ...core.host import HostProfile
from ...core.registry import create, implements
from ...core.state import state_fields
from ...core.terms import PolicyTerms, masked
from .columns import turns
from .loss import sum_over
from .profile import FLAG_LOSS_SIGNALS, FLAG_SIGNALS, USE_TRAINER
from .settings import plain


@dataclass
class RLXPolicyLossConfig(PolicyLossConfig):
    """verl's `policy_loss` with the parameters of a clip of ours under `params`."""

    params: dict[str, Any] = field(default_factory=dict)


class _Flags(HostProfile):
    """verl without a trainer of ours: one remedy for everything it lacks."""

    def remedy(self, missing: str) -> str:
        return USE_TRAINER


def advantages(
    name: str, *, token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, index: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B,T] of the estimator `rlx.<name>`; verl's padding rows are in no statistic."""
    parameters = plain(config.get("rlx")) if config is not None else None
    part = _advantage(name, _frozen(parameters or {}))
    mask = response_mask.bool()
    uids = list(index) if index is not None else list(range(len(mask)))
    place = {uid: i for i, uid in enumerate(dict.fromkeys(uids))}
    padding = torch.tensor([str(uid).startswith("pad") for uid in uids], device=mask.device) & ~mask.any(1)
    turn = turns(mask)
    batch = RolloutBatch(
        {
            "response_mask": mask,
            "hint_mask": torch.zeros_like(mask),
            "turn_ids": turn,
            "segment_ids": turn,
            "group": torch.tensor([place[uid] for uid in uids], device=mask.device),
            "rewards": torch.where(padding, torch.nan, token_level_rewards.sum(1)),
            "keep": torch.ones(len(mask), dtype=torch.bool, device=mask.device),
        }
    )
    scorable = torch.isfinite(batch.rewards)[:, None] & mask
    out = _told(f"advantage {name}", lambda: part(batch)["advantages"])
    out = masked(out, scorable).to(token_level_rewards.dtype)
    return out, out


def clipped_loss(
    name: str,
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, dict[str, Any]]:
    """The policy loss `rlx.<name>`: the clip's token losses, aggregated the way verl's `loss_agg_mode` says."""
    parts = _clip(name, _frozen(dict(getattr(config.policy_loss, "params", {}) or {})))
    mask = response_mask.bool()
    batch = RolloutBatch({"response_mask": mask, "logp_old": old_log_prob, "advantages": advantages})
    terms = PolicyTerms(log_prob, batch, advantages=advantages, all_reduce=sum_over(None))

    def token_losses() -> Any:
        terms.ratio = parts.one("ratio")(terms)
        return parts.one("clip")(terms)

    result = _told(f"clip {name}", token_losses)
    losses, metrics = result if isinstance(result, tuple) else (result, {})
    losses = masked(losses, mask)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(loss_mat=losses, loss_mask=mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    return loss, {f"rlx/clip/{key}": value.detach() for key, value in metrics.items()}


@cache
def _advantage(name: str, parameters: tuple[tuple[str, Any], ...]) -> Any:
    part = create("advantage", name, **dict(parameters))
    check_host(Parts({"advantage": [part]}), _Flags("verl's flags", FLAG_SIGNALS))
    _refuse_hooks(part)
    return part


@cache
def _clip(name: str, parameters: tuple[tuple[str, Any], ...]) -> Parts:
    spec = {"name": name, **dict(parameters)}
    parts = build({"clip": spec}, _Flags("verl's flags", FLAG_LOSS_SIGNALS))
    part = parts.one("clip")
    _refuse_hooks(part)
    if part.fixes.get("aggregate") is not None or part.fixes.get("advantage") is not None:
        raise ConfigError(f"clip {name} decides more than a policy loss: {USE_TRAINER}")
    return parts


def _refuse_hooks(part: Any) -> None:
    """Refuse state, which verl's checkpoints would not hold, and hooks that verl's flags never call."""
    label = f"{part.kind} {part.name}"
    if state_fields(part):
        raise ConfigError(f"{label} learns from step to step, and verl saves no state of a flag: {USE_TRAINER}")
    for hook in ("in_loss", "from_logits", "annotate"):
        if hasattr(type(part), hook) and implements(part, hook):
            raise ConfigError(f"{label} needs its hook {hook} called: {USE_TRAINER}")


def _told(label: str, run: Any) -> Any:
    try:
        return run()
    except MissingSignal as error:
        raise ConfigError(f"{label} reads what verl's flags do not carry ({error}): {USE_TRAINER}") from error


def _frozen(parameters: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((key, tuple(v) if isinstance(v, list) else v) for key, v in parameters.items()))
