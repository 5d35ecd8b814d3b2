"""Function forms of the clipping rules that papers add to those of the hosts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...core.context import Context
from ...core.registry import create
from ...core.terms import PolicyTerms
from ...core.trajectory import Group
from .building import reward_batch, run_loss, tensor

Result = dict[str, Any]


def bapo(
    logp_new,
    logp_old,
    advantages,
    response_mask,
    target=1.0,
    low_start=0.6,
    low_max=0.8,
    low_step=0.05,
    high_start=1.2,
    high_max=2.0,
    high_step=0.05,
    eps=1e-8,
    dual_clip=3.0,
    order="low_first",
    agg="token-mean",
    accounting="value",
    rollout_is_weights=None,
) -> Result:
    clip = create(
        "clip",
        "bapo",
        target=target,
        low_start=low_start,
        low_max=low_max,
        low_step=low_step,
        high_start=high_start,
        high_max=high_max,
        high_step=high_step,
        eps=eps,
        dual_clip=dual_clip,
        order=order,
        accounting=accounting,
    )
    return run_loss(
        {"clip": clip},
        logp_new=logp_new,
        logp_old=tensor(logp_old),
        advantages=advantages,
        response_mask=response_mask,
        agg=agg,
        correction=rollout_is_weights,
    )


def sat(
    logp_new,
    logp_old,
    advantages,
    response_mask,
    eps_low=0.2,
    eps_high=0.2,
    quantile=0.9,
    hill=2.0,
    level="token",
    agg="token-mean",
) -> Result:
    clip = create(
        "clip",
        "sat",
        eps_low=eps_low,
        eps_high=eps_high,
        quantile=quantile,
        hill=hill,
        level=level,
        denominator="logp_old",
    )
    out = run_loss(
        {"clip": clip, "ratio": _ratio(level)},
        logp_new=logp_new,
        logp_old=tensor(logp_old),
        advantages=advantages,
        response_mask=response_mask,
        agg=agg,
    )
    batch = reward_batch(response_mask=response_mask).with_columns(logp_old=tensor(logp_old))
    region = clip.trust_region(PolicyTerms(tensor(logp_new), batch))
    return {**out, **region._asdict(), "gate": region.gate.long()}


def gapo_clip(
    logp_new,
    logp_old,
    rewards,
    group,
    response_mask,
    eps_low=None,
    eps_high_max=None,
    level="sequence",
    success_threshold=0.5,
    eps_max=None,
) -> Result:
    """`eps_low` and `eps_high_max` (or eps_max) default to 0.003 and 0.005, also at token level."""
    high = next(x for x in (eps_high_max, eps_max, 5e-3) if x is not None)
    low = 3e-3 if eps_low is None else eps_low
    clip = create("clip", "gapo_clip", level=level, eps_low=low, eps_high_max=high, success_threshold=success_threshold)
    widths = tensor(_annotated(clip, tensor(rewards).tolist(), tensor(group).tolist(), "gapo_eps_high"))
    batch = reward_batch(rewards, group, response_mask)
    advantages = create("advantage", "grpo", scale="none")(reward_batch(rewards, group))["advantages"][:, 0]
    out = run_loss(
        {"clip": clip, "ratio": _ratio(level)},
        logp_new=logp_new,
        logp_old=tensor(logp_old),
        advantages=advantages,
        response_mask=response_mask,
        agg="seq-mean-token-mean" if level == "sequence" else "token-mean",
        gapo_eps_high=widths,
    )
    mask = batch.response_mask
    return {
        **out,
        "advantages": advantages,
        "eps_high": widths,
        "clipped": _clipped(out["ratio"], advantages[:, None], 1 - low, 1 + widths[:, None], mask),
        "live": mask.any(1).long(),
    }


def pnpo(
    logp_new,
    logp_old,
    advantages,
    response_mask,
    clip_low=None,
    clip_high=None,
    grad_mode="token",
    agg="token-mean",
    eps_low=None,
    eps_high=None,
) -> Result:
    """`clip_low` (or eps_low) and `clip_high` (or eps_high) default to 0.2."""
    low = next(x for x in (clip_low, eps_low, 0.2) if x is not None)
    high = next(x for x in (clip_high, eps_high, 0.2) if x is not None)
    specs = create("method", "pnpo", eps_low=low, eps_high=high, grad_mode=grad_mode).expand()
    out = run_loss(
        {kind: _created(kind, **spec) for kind, spec in specs.items()},
        logp_new=logp_new,
        logp_old=tensor(logp_old),
        advantages=advantages,
        response_mask=response_mask,
        agg=agg,
    )
    adv, mask = tensor(advantages), tensor(response_mask).bool()
    adv = adv[:, None] if adv.ndim == 1 else adv
    return {
        **out,
        "weight": out["ratio"],
        "clipped": _clipped(out["ratio"], adv, 1 - low, 1 + high, mask),
    }


def _annotated(part: Any, rewards: list[float], group: list[float], column: str) -> list[float]:
    """What `part.annotate` leaves in `column` for finished rollouts with these rewards (NaN: unscorable)."""
    groups: dict[float, Group] = {}
    rollouts = []
    for reward, g in zip(rewards, group, strict=True):
        (rollout,) = groups.setdefault(g, Group(str(g), str(g), [0])).start(1)
        rollout.finish("eos")
        rollout.reward = reward
        rollouts.append(rollout)
    ctx = Context(0, 1, groups=len(groups), group_size=len(rollouts), max_tokens=1, prompts={})
    part.annotate(list(groups.values()), ctx)
    return [r.extras[column] for r in rollouts]


def _created(kind: str, name: str, **parameters: Any) -> Any:
    return create(kind, name, **parameters)


def _ratio(level: str) -> Any:
    return create("ratio", "sequence", log_max=20.0) if level == "sequence" else create("ratio", "token")


def _clipped(ratio: Tensor, advantages: Tensor, low: Any, high: Any, mask: Tensor) -> Tensor:
    """[B,T] 0/1: the token's gradient is removed by the clip; a ratio on the bound keeps it."""
    return (mask & (((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low)))).long()


FORMS = {"bapo": bapo, "sat": sat, "gapo_clip": gapo_clip, "pnpo": pnpo}
