"""Function forms of the corrections that mask by a band, decouple the proximal policy, or stitch stages together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.batch import pack
from ...core.context import Context
from ...core.operations import Operation
from ...core.registry import create
from ...core.rollout import drive
from ...core.terms import PolicyTerms, masked
from ...core.trajectory import Group, Segment
from ...corrections.ppo_ewma import ProximalAverage
from .building import reward_batch, run_loss, tensor

Result = dict[str, Any]


def mis(
    logp_old,
    logp_rollout,
    response_mask,
    level="token",
    lower=0.5,
    upper=2.0,
    mode="zero_weight",
    use_weight=True,
    veto=None,
    safety=20.0,
) -> Result:
    part = create(
        "correction",
        "mis",
        level=level,
        lower=lower,
        upper=upper,
        mode=mode,
        use_weight=use_weight,
        veto=veto,
        safety=safety,
    )
    batch = reward_batch(response_mask=response_mask).with_columns(
        logp_old=tensor(logp_old), logp_rollout=tensor(logp_rollout)
    )
    found = part(batch)
    return {
        "weights": found["weight"],
        "mask": found.get("response_mask", batch.response_mask).long(),
        "kept_tokens": found["kept_tokens"],
        "kept_seqs": found["kept_rows"],
    }


def decoupled_ppo(
    logp_new,
    logp_prox,
    logp_behav=None,
    advantages=None,
    response_mask=None,
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=None,
    cap=None,
    cap_mode="mask",
    versions=None,
    current_version=None,
    agg="token-mean",
    eps_low=None,
    eps_high=None,
    logp_old=None,
    logp_rollout=None,
    staleness=None,
) -> Result:
    """`logp_prox` may come as logp_old, `logp_behav` as logp_rollout, current_version - versions as staleness."""
    prox = logp_prox if logp_prox is not None else logp_old
    behav = tensor(logp_behav if logp_behav is not None else logp_rollout)
    mask = tensor(response_mask).bool()
    specs = create(
        "method",
        "decoupled_ppo",
        proximal="interpolated" if prox is None else "scored",
        eps_low=clip_low if eps_low is None else eps_low,
        eps_high=clip_high if eps_high is None else eps_high,
        dual_clip=dual_clip,
        cap=cap,
        cap_mode=cap_mode,
    ).expand()
    parts = {kind: _created(kind, **spec) for kind, spec in specs.items()}
    columns = {"logp_old": tensor(logp_new if prox is None else prox), "logp_rollout": behav}
    weight = None
    if prox is None:
        columns["staleness"] = _staleness(versions, current_version, staleness, behav)
        batch = reward_batch(response_mask=response_mask).with_columns(**columns)
        found = parts["clip"].interpolate(PolicyTerms(tensor(logp_new), batch))
        scored, behave = found.logp_prox, found.weight
    else:
        batch = reward_batch(response_mask=response_mask).with_columns(**columns)
        behave = weight = parts.pop("correction")(batch)["weight"]
        scored = masked(columns["logp_old"], mask)
    out = run_loss(
        parts,
        logp_new=logp_new,
        advantages=advantages,
        response_mask=response_mask,
        agg=agg,
        correction=weight,
        **columns,
    )
    if weight is not None:
        out["per_token_loss"] = out["per_token_loss"] * weight
    return {**out, "logp_prox": scored, "behave_weight": behave}


def copris_is(
    stage_logps,
    stage_lengths,
    logp_new,
    advantages,
    response_mask,
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=10.0,
    agg="token-mean",
    eps_low=None,
    eps_high=None,
) -> Result:
    mask = tensor(response_mask).bool()
    specs = create(
        "method",
        "copris_is",
        eps_low=clip_low if eps_low is None else eps_low,
        eps_high=clip_high if eps_high is None else eps_high,
        dual_clip=dual_clip,
    ).expand()
    behavior, stage = _stages(create("pruner", "copris_is"), stage_logps, stage_lengths, mask)
    old = torch.where(torch.isnan(behavior), 0.0, behavior)
    out = run_loss(
        {kind: _created(kind, **specs[kind]) for kind in ("ratio", "clip")},
        logp_new=logp_new,
        advantages=advantages,
        response_mask=response_mask,
        agg=agg,
        logp_old=old,
        logp_behavior=behavior,
    )
    return {**out, "logp_old": old, "stage": stage}


def _stages(part: Any, stage_logps: Any, stage_lengths: Any, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Grow a rollout per row stage by stage, each stage closed by `part`; returns logp_behavior and stage [B,T]."""
    group = Group("g", "p", [0])
    rollouts = group.start(len(mask))
    logps = [tensor(x).tolist() for x in stage_logps]
    for s, lengths in enumerate(stage_lengths):
        for r, length in zip(rollouts, lengths, strict=True):
            r.state = "parked"
            if (more := int(length) - len(r)) > 0:
                r.segments.append(Segment([0] * more, version=s))

        def scored(operation: Operation, s: int = s) -> list[list[float]]:
            return [logps[s][r.slot][: len(r)] for r in operation.rollouts]

        ctx = Context(s, len(logps), groups=1, group_size=len(rollouts), max_tokens=mask.shape[1], prompts={})
        drive(part.close([group], ctx), scored)
    for r in rollouts:
        r.finish("eos")
    batch = pack([group], version=len(logps), dtype=torch.float64)
    stage = torch.full(mask.shape, -1)
    width = min(mask.shape[1], batch.response_ids.shape[1])
    written = batch.turn_ids[:, :width] >= 0
    stage[:, :width] = torch.where(written, len(logps) - batch.staleness[:, :width], -1)
    behavior = torch.full(mask.shape, torch.nan, dtype=torch.float64)
    if batch.has("logp_behavior"):
        behavior[:, :width] = batch.logp_behavior[:, :width]
    return behavior, stage


def ppo_ewma(
    logp_new,
    logp_prox,
    logp_rollout,
    advantages,
    response_mask,
    thetas=None,
    window=4,
    tau=0.9,
    active_fraction=None,
    clip_low=0.2,
    clip_high=0.28,
    d_low=0.5,
    d_high=2.0,
    weight="mask",
    agg="token-mean",
    eps_low=None,
    eps_high=None,
    min_active=None,
) -> Result:
    """`active_fraction`: the value after each of the updates `thetas`; 1 where it is not given."""
    specs = create(
        "method",
        "ppo_ewma",
        eps_low=clip_low if eps_low is None else eps_low,
        eps_high=clip_high if eps_high is None else eps_high,
        d_low=d_low,
        d_high=d_high,
        weight=weight,
        min_active=tau if min_active is None else min_active,
    ).expand()
    parts = {kind: _created(kind, **spec) for kind, spec in specs.items()}
    correction = parts.pop("correction")
    mask, adv = tensor(response_mask).bool(), tensor(advantages)
    columns = {"logp_prox": tensor(logp_prox), "logp_rollout": tensor(logp_rollout), "logp_old": tensor(logp_new)}
    batch = reward_batch(response_mask=response_mask).with_columns(
        advantages=(adv[:, None] if adv.ndim == 1 else adv).expand_as(mask), **columns
    )
    found = correction(batch)
    out = run_loss(
        parts,
        logp_new=logp_new,
        advantages=advantages,
        response_mask=response_mask,
        agg=agg,
        correction=found["weight"],
        **columns,
    )
    out["per_token_loss"] = masked(out["per_token_loss"], mask) * found["weight"]
    average = ProximalAverage(ProximalAverage.decay_for(window))
    trajectory, reset = _trajectory(average, correction, thetas or [], active_fraction)
    return {
        **out,
        "beta": average.decay,
        "theta_prox": trajectory,
        "reset": reset,
        "active_fraction": found["active_fraction"],
        "weights": found["weight"],
    }


def _trajectory(
    average: ProximalAverage, correction: Any, thetas: Any, active_fraction: Any
) -> tuple[list[list[float]], list[int]]:
    """The averaged weights after each update, and where the correction asked for a new start."""
    trajectory, reset = [], []
    for step, theta in enumerate(tensor(thetas) if len(thetas) else []):
        average.update([theta])
        active = None if active_fraction is None else tensor(active_fraction)[step].item()
        correction.load_state_dict({"active": active})
        if correction.reset_proximal:
            average.reset([theta])
        reset.append(int(correction.reset_proximal))
        trajectory.append(average.mean[0].tolist())
    return trajectory, reset


def _staleness(versions: Any, current_version: Any, staleness: Any, like: Tensor) -> Tensor:
    """[B,T] weight updates since each token was sampled; 0 for tokens that no version generated."""
    if staleness is not None:
        return tensor(staleness, torch.int64)
    if versions is None:
        return torch.zeros(like.shape, dtype=torch.int64)
    version = tensor(versions, torch.int64)
    return torch.where(version >= 0, current_version - version, 0)


def _created(kind: str, name: str, **parameters: Any) -> Any:
    return create(kind, name, **parameters)


FORMS = {"mis": mis, "decoupled_ppo": decoupled_ppo, "copris_is": copris_is, "ppo_ewma": ppo_ewma}
