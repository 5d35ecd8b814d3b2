"""Function forms of the clips for turns, critical steps, confident ends, and direct ratios."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.registry import create
from ...core.terms import PolicyTerms, masked
from .building import reward_batch, run_loss, tensor

Result = dict[str, Any]


def a2tgpo(
    logp_new,
    logp_old,
    advantages,
    response_mask,
    turn_ids,
    norm_ig,
    eps_low=0.2,
    eps_high=0.2,
    beta=0.3,
    ratio_level="turn",
    clip_ratio_c=None,
    dual_clip=None,
    gain_scale=None,
    level=None,
    agg="token-mean",
) -> Result:
    """`norm_ig`: per row the gains of its turns but the last; None, or a short list, leaves c = 1."""
    turns = tensor(turn_ids, torch.int64)
    gain = _of_turns(norm_ig, turns)
    level = ratio_level if level is None else level
    clip = create(
        "clip",
        "a2tgpo",
        eps_low=eps_low,
        eps_high=eps_high,
        gain_scale=beta if gain_scale is None else gain_scale,
        level=level,
        dual_clip=clip_ratio_c if dual_clip is None else dual_clip,
    )
    out = run_loss(
        {"clip": clip, "ratio": create("ratio", level)},
        logp_new=logp_new,
        logp_old=tensor(logp_old),
        advantages=advantages,
        response_mask=response_mask,
        agg=agg,
        turn_ids=turns,
        norm_ig=gain,
    )
    scale = clip.scale(gain)
    return {
        **out,
        "token_loss": out["per_token_loss"],
        "clip_fraction": out["clipped"],
        "eps_low": eps_low * scale,
        "eps_high": eps_high * scale,
    }


def _of_turns(norm_ig: Any, turns: Tensor) -> Tensor:
    """[B,T]: the gain of each token's turn, 0 for later turns and tokens without one."""
    out = torch.zeros(turns.shape, dtype=torch.float64)
    for b, gains in enumerate(norm_ig if norm_ig is not None else ()):
        for t, gain in enumerate(gains if gains is not None else ()):
            out[b, turns[b] == t] = float("nan") if gain is None else float(gain)
    return out


def elpo(
    logp_new=None,
    logp_old=None,
    advantages=None,
    response_mask=None,
    critical_mask=None,
    eps_low=0.2,
    eps_high=0.315,
    extra=0.115,
    turn_ids=None,
    critical_turn=None,
    failed=None,
    agg="token-mean",
) -> Result:
    """The loss under a critical mask [B,T]; or, from turn_ids, critical_turn and failed, the mask itself (`result`)."""
    clip = create("clip", "elpo", eps_low=eps_low, eps_high=eps_high, extra=extra)
    if critical_mask is not None:  # as a turn 1, critical, after a turn 0 that is not
        columns = {"turn_ids": (tensor(critical_mask) > 0).long(), "critical_turn": torch.ones(len(critical_mask))}
        failed = [True] * len(critical_mask)
    else:
        columns = {"turn_ids": tensor(turn_ids, torch.int64), "critical_turn": tensor(critical_turn)}
    columns["rewards"] = 1 - tensor(failed)
    shape = columns["turn_ids"].shape
    batch = reward_batch(response_mask=torch.ones(shape)).with_columns(**columns)
    critical = clip.critical(batch).long()
    if logp_new is None:
        return {"result": critical, "critical_mask": critical}
    out = run_loss(
        {"clip": clip},
        logp_new=logp_new,
        logp_old=tensor(logp_old),
        advantages=advantages,
        response_mask=response_mask,
        agg=agg,
        **columns,
    )
    return {**out, "token_loss": out["per_token_loss"], "clip_fraction": out["clipped"], "critical_mask": critical}


def echo(
    confidence,
    response_mask,
    tail_window=16,
    eps_min=0.05,
    eps_max=0.2,
    kappa=4.0,
    logp_new=None,
    logp_old=None,
    advantages=None,
    dual_clip=3.0,
    slope=None,
    agg="token-mean",
) -> Result:
    """The half-widths; with the log-probs and advantages also the loss."""
    clip = create(
        "clip",
        "echo",
        tail_window=tail_window,
        eps_min=eps_min,
        eps_max=eps_max,
        slope=kappa if slope is None else slope,
        dual_clip=dual_clip,
    )
    given = tensor(confidence)
    found = clip.range(reward_batch(response_mask=response_mask).with_columns(confidence=given))
    if logp_new is None:
        return found._asdict()
    out = run_loss(
        {"clip": clip},
        logp_new=logp_new,
        logp_old=tensor(logp_old),
        advantages=advantages,
        response_mask=response_mask,
        agg=agg,
        confidence=given,
    )
    return {**out, "token_loss": out["per_token_loss"], "clip_fraction": out["clipped"], **found._asdict()}


def sao(
    logp_new,
    logp_rollout,
    advantages,
    response_mask,
    eps_low=0.3,
    eps_high=5.0,
    agg="token-mean",
) -> Result:
    clip = create("clip", "sao", eps_low=eps_low, eps_high=eps_high)
    out = run_loss(
        {"clip": clip},
        logp_new=logp_new,
        logp_rollout=tensor(logp_rollout),
        logp_old=tensor(logp_rollout),
        advantages=advantages,
        response_mask=response_mask,
        agg=agg,
    )
    mask = tensor(response_mask).bool()
    terms = PolicyTerms(tensor(logp_new), reward_batch(response_mask=response_mask))
    terms.batch = terms.batch.with_columns(logp_rollout=tensor(logp_rollout))
    given = tensor(advantages)
    terms.advantages = given[:, None].expand_as(mask) if given.ndim == 1 else given
    keep = clip.band(terms).keep
    return {**out, "keep": keep.long(), "ratio": masked(terms.log_ratio("logp_rollout").exp(), keep)}


FORMS = {"a2tgpo": a2tgpo, "elpo": elpo, "echo": echo, "sao": sao}
