"""Function form of HAPO's clip."""

from __future__ import annotations

from typing import Any

from ...core.registry import create
from ...core.terms import PolicyTerms
from .building import reward_batch, run_loss, tensor

Result = dict[str, Any]


def hapo(
    logp_new,
    logp_old,
    advantages,
    response_mask,
    h,
    eps_low=0.2,
    eps_high=0.2,
    alpha=1.0,
    clip_ratio_c=10.0,
    dual_clip=None,
    agg="token-mean",
) -> Result:
    """`h` [B,T]: the entropy score; eps_low and eps_high are returned per token."""
    clip = create(
        "clip",
        "hapo",
        eps_low=eps_low,
        eps_high=eps_high,
        alpha=alpha,
        dual_clip=clip_ratio_c if dual_clip is None else dual_clip,
    )
    score = tensor(h)
    out = run_loss(
        {"clip": clip},
        logp_new=logp_new,
        logp_old=tensor(logp_old),
        advantages=advantages,
        response_mask=response_mask,
        agg=agg,
        entropy_score=score,
    )
    batch = reward_batch(response_mask=response_mask).with_columns(entropy_score=score)
    low, high = clip.bounds(PolicyTerms(tensor(logp_new), batch))
    return out | {"token_loss": out["per_token_loss"], "eps_low": low, "eps_high": high}


FORMS = {"hapo": hapo}
