"""Function forms of the clips: the losses both hosts come with, and the methods of clip_adaptive.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.errors import ConfigError
from ...core.registry import create
from ...core.terms import masked, masked_mean
from .building import only_given, reward_batch, run_loss, tensor
from .clip_adaptive import FORMS as METHOD_FORMS
from .clip_divergence import FORMS as DIVERGENCE_FORMS
from .clip_entropy import FORMS as ENTROPY_FORMS
from .clip_turns import FORMS as TURN_FORMS

Result = dict[str, Any]


def baselines(
    logp_new,
    logp_old,
    advantages,
    response_mask,
    host="verl",
    loss=None,
    agg="token-mean",
    horizon=None,
    low=None,
    high=None,
    c=None,
    tau_pos=1.0,
    tau_neg=1.05,
    beta=None,
    ratio=None,
    lb=1.0,
    ub=5.0,
    coef=0.1,
    level="token",
    delta=None,
    opsm=None,
    max_len=None,
    num_items=None,
    eps_low=None,
    eps_high=None,
    dual_clip=None,
    rollout_is_weights=None,
    importance_sampling_ratio=None,
    draw=None,
) -> Result:
    """A loss of verl 0.9.1 (`host="verl"`: `loss_mode` and `loss_agg_mode`) or TRL 1.16 (`host="trl"`: `loss_type`).

    Range: low, high (or eps_low, eps_high), 0.2 each; TRL's high follows low. Dual clip of verl's vanilla and ratio cap
    of its dppo: c (or dual_clip), 3. `draw` [B,T]: clip_cov's uniform numbers. Where verl divides 0 by 0 the loss is
    NaN, as there; the plug-ins themselves give 0.
    """
    low = low if low is not None else eps_low
    high = high if high is not None else eps_high
    mask, old = tensor(response_mask).bool(), tensor(logp_old)
    low = 0.2 if low is None else low
    columns: dict[str, Any] = {"logp_old": old}
    if draw is not None:
        columns["uniform:clip_cov/drop"] = tensor(draw)
    if host == "verl":
        high = 0.2 if high is None else high
        c = next(x for x in (c, dual_clip, 3.0) if x is not None)
        parts, rule = _verl(loss or "vanilla", agg, horizon, low, high, c, tau_pos, tau_neg, beta, ratio, lb, ub, coef)
        weight = None if rollout_is_weights is None else tensor(rollout_is_weights)
        total = None
    elif host == "trl":
        high = low if high is None else high
        parts, rule = _trl(loss or "dapo", level, low, high, delta, tau_pos, tau_neg, max_len)
        weight = None if importance_sampling_ratio is None else tensor(importance_sampling_ratio)
        if weight is not None and parts["clip"].name == "vespo":
            columns["logp_rollout"] = old - (
                weight.log() if weight.shape == old.shape else _spread_sum(weight.log(), mask)
            )
            parts["clip"] = parts["clip"].replace(denominator="logp_rollout")
            weight = None
        total = num_items if rule.name == "token_mean" else None
    else:
        raise ConfigError(f"host: expected 'verl' or 'trl', got {host!r}")
    if opsm is not None:
        keep = _opsm(opsm, logp_new, old, advantages, mask)
        weight = keep if weight is None else weight * keep
    if weight is not None:
        weight = masked(weight.expand_as(old), mask)
        columns["correction_weight"] = weight
    out = run_loss(
        parts,
        logp_new=logp_new,
        response_mask=response_mask,
        advantages=advantages,
        agg=rule,
        correction=weight,
        total=total,
        **columns,
    )
    if weight is not None:
        out["per_token_loss"] = out["per_token_loss"] * weight
    if parts["clip"].name == "gmpo":
        out["per_seq_loss"] = masked_mean(out["per_token_loss"], mask, dim=1)
    elif host == "verl" and rule.name != "token_sum" and not bool(mask.any()):
        out["loss"] = torch.full_like(out["loss"], torch.nan)
    return out


def _verl(loss, agg, horizon, low, high, c, tau_pos, tau_neg, beta, ratio, lb, ub, coef) -> tuple[dict[str, Any], Any]:
    """The plug-ins of a `loss_mode`, and its aggregate."""
    unbounded = create("ratio", "token", log_clamp=None)
    share = only_given(drop_share=ratio) if loss == "clip_cov" else only_given(penalty_share=ratio)
    parts: dict[str, Any] = {}
    if loss == "vanilla":
        parts["clip"] = create("clip", "ppo", eps_low=low, eps_high=high, dual_clip=c)
    elif loss == "gspo":
        parts = {"ratio": create("ratio", "sequence"), "clip": create("clip", "ppo", eps_low=low, eps_high=high)}
    elif loss == "sapo":
        agg = "seq-mean-token-mean"
        parts["clip"] = create("clip", "sapo", tau_pos=tau_pos, tau_neg=tau_neg)
    elif loss == "cispo":
        parts["clip"] = create("clip", "cispo", eps_low=low, eps_high=high)
    elif loss == "geo_mean":
        parts["clip"] = create("clip", "gmpo", log_eps_low=low, log_eps_high=high)
        return parts, create("aggregate", "seq_mean_token_mean", empty_rows="count")
    elif loss == "clip_cov":
        clip = create("clip", "clip_cov", eps_low=low, eps_high=high, cov_low=lb, cov_high=ub, **share)
        parts = {"ratio": unbounded, "clip": clip}
    elif loss == "kl_cov":
        parts["clip"] = create("clip", "kl_cov", penalty_coef=coef, **share)
    elif loss == "gpg":
        parts["clip"] = create("clip", "gpg")
    elif loss == "dro":
        parts["clip"] = create("clip", "dro", **only_given(penalty_coef=beta))
    elif loss in ("dppo_tv", "dppo_kl"):
        bounds = {"delta_low": low, "delta_high": high, "ratio_cap": c}
        parts["clip"] = create("clip", "dppo", variant=loss.removeprefix("dppo_"), **bounds)
    else:
        known = "vanilla, gspo, sapo, cispo, geo_mean, clip_cov, kl_cov, gpg, dro, dppo_tv, dppo_kl"
        raise ConfigError(f"loss: host verl has {known}; got {loss!r}")
    norm = only_given(horizon=horizon) if agg.replace("-", "_") == "seq_mean_token_sum_norm" else {}
    return parts, create("aggregate", agg.replace("-", "_"), **norm)


def _trl(loss, level, low, high, delta, tau_pos, tau_neg, max_len) -> tuple[dict[str, Any], Any]:
    """The plug-ins of a `loss_type`, and its aggregate."""
    if level not in ("token", "sequence"):
        raise ConfigError(f"level: expected 'token' or 'sequence', got {level!r}")
    parts: dict[str, Any] = {"ratio": create("ratio", "token", log_clamp=None)}
    if level == "sequence":
        parts["ratio"] = create("ratio", "sequence", gradient="sequence", log_max=None)
    if loss == "cispo":
        parts["clip"] = create("clip", "cispo", ratio_high=high)
    elif loss == "sapo":
        parts["clip"] = create("clip", "sapo", tau_pos=tau_pos, tau_neg=tau_neg)
    elif loss == "vespo":
        parts["clip"] = create("clip", "vespo")
    elif delta is not None:
        parts["clip"] = create("clip", "two_sided", eps_low=low, eps_high=high, delta=delta)
    else:
        parts["clip"] = create("clip", "ppo", eps_low=low, eps_high=high)
    rules: dict[str, tuple[str, dict[str, Any]]] = {
        "grpo": ("seq_mean_token_mean", {"empty_rows": "count"}),
        "sapo": ("seq_mean_token_mean", {"empty_rows": "count"}),
        "bnpo": ("bnpo", {}),
        "dr_grpo": ("seq_mean_token_sum_norm", {"empty_rows": "count", "horizon": max_len}),
        "dapo": ("token_mean", {}),
        "cispo": ("token_mean", {}),
        "vespo": ("token_mean", {}),
        "luspo": ("seq_mean_token_sum", {"empty_rows": "count"}),
    }
    if loss not in rules:
        raise ConfigError(f"loss: host trl has {', '.join(rules)}; got {loss!r}")
    rule, parameters = rules[loss]
    return parts, create("aggregate", rule, **parameters)


def _opsm(threshold, logp_new, logp_old, advantages, mask) -> Tensor:
    """[B,T] keep mask of a step whose policy at the start is `logp_new` and whose engine sampled with `logp_old`."""
    adv = tensor(advantages)
    adv = adv[:, None].expand_as(mask) if adv.ndim == 1 else adv
    batch = reward_batch(response_mask=mask.double()).with_columns(
        advantages=adv, logp_old=tensor(logp_new), logp_rollout=logp_old
    )
    return create("correction", "opsm", threshold=threshold)(batch)["weight"]


def _spread_sum(per_row: Tensor, mask: Tensor) -> Tensor:
    """[B,1] -> [B,T]: values whose sum over the row's tokens is the row's."""
    return per_row / mask.sum(1, keepdim=True).clamp(min=1)


FORMS = {"baselines": baselines, **METHOD_FORMS, **DIVERGENCE_FORMS, **ENTROPY_FORMS, **TURN_FORMS}
