"""Function forms of the clips that bound a divergence, a rollout's ratio, or all by one effective sample size."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ...core.registry import create
from ...core.terms import PolicyTerms, masked
from .building import reward_batch, run_loss, tensor

Result = dict[str, Any]


def dppo(
    logp_new,
    logp_old,
    advantages,
    response_mask,
    variant="tv",
    delta_low=0.2,
    delta_high=0.2,
    ratio_cap=20.0,
    agg="token-mean",
) -> Result:
    clip = create("clip", "dppo", variant=variant, delta_low=delta_low, delta_high=delta_high, ratio_cap=ratio_cap)
    out = run_loss(
        {"clip": clip},
        logp_new=logp_new,
        logp_old=tensor(logp_old),
        advantages=advantages,
        response_mask=response_mask,
        agg=agg,
    )
    terms = _terms(logp_new, advantages, response_mask, logp_old=logp_old)
    moved = clip.moved(terms)
    return {**out, "divergence": moved.divergence, "keep": (moved.keep & terms.mask).long()}


def tbpo(
    logp_new,
    logp_old,
    logp_rollout,
    advantages,
    response_mask,
    eps_low=0.0003,
    eps_high=0.0004,
    eps_neg_high=0.0004,
    band_low=0.5,
    band_high=2.0,
) -> Result:
    clip = create(
        "clip",
        "tbpo",
        eps_low=eps_low,
        eps_high=eps_high,
        eps_neg_high=eps_neg_high,
        band_low=band_low,
        band_high=band_high,
    )
    out = run_loss(
        {"clip": clip},
        logp_new=logp_new,
        logp_old=tensor(logp_old),
        logp_rollout=tensor(logp_rollout),
        advantages=advantages,
        response_mask=response_mask,
        agg="seq-mean-token-mean",
    )
    terms = _terms(logp_new, advantages, response_mask, logp_old=logp_old, logp_rollout=logp_rollout)
    rows = clip.rows(terms)
    inside = (rows.ratio >= 1 - eps_low) & (rows.ratio <= 1 + eps_neg_high)
    on = torch.where(rows.advantage < 0, inside, rows.ratio <= 1 + eps_high)
    return {
        **out,
        "seq_ratio": rows.ratio,
        "mismatch_weight": rows.weight,
        "keep": rows.keep.long(),
        "per_seq_loss": rows.loss,
        "grad_on": (on & rows.keep).long(),
    }


def ess(
    logp_new,
    logp_old,
    advantages,
    response_mask,
    kl_clamp=10.0,
    level="batch",
    eps=1e-8,
    agg="token-mean",
    logp_prox=None,
) -> Result:
    """With `logp_prox` the mixture variant."""
    columns = {"logp_old": tensor(logp_old)} | ({} if logp_prox is None else {"logp_prox": tensor(logp_prox)})
    clip = create(
        "clip",
        "ess",
        kl_clamp=kl_clamp,
        level=level,
        eps=eps,
        denominator="logp_old",
        proximal=None if logp_prox is None else "logp_prox",
    )
    out = run_loss(
        {"clip": clip}, logp_new=logp_new, advantages=advantages, response_mask=response_mask, agg=agg, **columns
    )
    terms = _terms(logp_new, advantages, response_mask, **columns)
    drifts = clip.drifts(terms, [*columns])
    size = torch.stack([d.ess for d in drifts]).amin(0)
    log_ratio = drifts[0].log_ratio if logp_prox is None else clip.mixed(drifts)
    return {
        **out,
        "ess": size[:, 0].expand(len(terms.mask)),
        "rho": clip.capped(drifts[0], size, terms.mask),
        "kl": clip.divergence(log_ratio, terms.mask),
    }


def pdm(
    logits_new,
    logits_old,
    token_ids=None,
    advantages=None,
    response_mask=None,
    divergence="tv",
    estimator="full",
    topk=20,
    delta_low=0.15,
    delta_high=0.15,
    ratio_cap=20.0,
    direction="predictive",
    agg="token-mean",
    response_ids=None,
) -> Result:
    """estimator="full": the behaviour's whole distribution stands in for its top K."""
    ids = tensor(token_ids if response_ids is None else response_ids, torch.int64)
    mask = tensor(response_mask).bool()
    new, old = (torch.where(mask[..., None], tensor(x), 0.0) for x in (logits_new, logits_old))
    ids = torch.where(mask, ids, 0)
    logp_new, logp_old = ((x - x.logsumexp(-1, keepdim=True)) for x in (new, old))
    k = new.shape[-1] if estimator == "full" else min(topk, new.shape[-1])
    order = torch.argsort(logp_old, dim=-1, descending=True, stable=True)[..., :k]
    sampled_new, sampled_old = (x.gather(-1, ids[..., None])[..., 0] for x in (logp_new, logp_old))
    columns = {
        "response_ids": ids,
        "logp_old": sampled_old,
        "logp_rollout": sampled_old,
        "rollout_top_ids": order,
        "rollout_top_logp": logp_old.gather(-1, order),
    }
    clip = create(
        "clip",
        "pdm",
        divergence=divergence,
        estimator="aggregate" if estimator == "full" else estimator,
        delta_low=delta_low,
        delta_high=delta_high,
        ratio_cap=ratio_cap,
        direction=direction,
    )
    made = clip.from_logits(new, columns)
    out = run_loss(
        {"clip": lambda terms: clip(dataclasses.replace(terms, logits=made))},  # type: ignore[dict-item]
        logp_new=sampled_new,
        advantages=advantages,
        response_mask=response_mask,
        agg=agg,
        **columns,
    )
    terms = _terms(sampled_new, advantages, response_mask, **columns)
    ratio = terms.log_ratio("logp_rollout", clip.log_clamp).exp()
    keep = clip.kept(terms.advantages, made["pdm_divergence"], made["pdm_direction"], ratio)
    return {
        **out,
        "divergence": masked(made["pdm_divergence"], mask),
        "predicted": masked(made["pdm_direction"], mask),
        "keep": (keep & mask).long(),
        "ratio": ratio,
    }


def _terms(logp_new: Any, advantages: Any, response_mask: Any, **columns: Any) -> PolicyTerms:
    """The terms of a micro-batch that is the whole batch, for what a clip computes on the way."""
    mask = tensor(response_mask).bool()
    adv = tensor(advantages)
    given: dict[str, Tensor] = {n: v if isinstance(v, Tensor) else tensor(v) for n, v in columns.items()}
    batch = reward_batch(response_mask=mask.double()).with_columns(**given)
    advantages = masked((adv[:, None] if adv.ndim == 1 else adv).expand_as(mask), mask)
    return PolicyTerms(tensor(logp_new), batch, advantages=advantages)


FORMS = {"dppo": dppo, "tbpo": tbpo, "ess": ess, "pdm": pdm}
