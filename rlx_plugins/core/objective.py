"""The loss of one micro-batch: loss = sum over terms of coef * sum(weight * token_loss) / total(count)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .batch import RolloutBatch
from .errors import DataError
from .returned import check_token_tensor
from .terms import PolicyTerms, _alone, masked

if TYPE_CHECKING:
    from .config import Parts

POLICY, DISTILL = "policy", "distill"
"""Names of the loss terms; an auxiliary's term is named after it."""


def reduce(token_loss: Tensor, weight: Tensor, total: Tensor | float) -> Tensor:
    """sum(weight * token_loss) / total over the tokens of non-zero weight; a total of 0 divides by nothing.

    token_loss, weight [B,T]; `total` the count of the term over the whole optimizer step, all ranks. It is 0 where no
    token counts (then the loss is 0 too) and under an aggregate that only sums.
    """
    total = total if isinstance(total, Tensor) else torch.as_tensor(total)
    total = total.to(device=token_loss.device, dtype=token_loss.dtype)
    safe = torch.where(total > 0, total, torch.ones_like(total))
    return (masked(token_loss, weight != 0) * weight.to(token_loss.dtype)).sum() / safe


def policy_loss(
    parts: Parts,
    batch: RolloutBatch,
    logp_new: Tensor,
    *,
    totals: Mapping[str, Tensor | float],
    entropy: Tensor | None = None,
    logits: Tensor | Mapping[str, Tensor] | None = None,
    all_reduce: Callable[[Tensor], Tensor] = _alone,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss (scalar, with gradient) and detached metrics of one micro-batch.

    batch     a micro-batch of what `prepare` returned (weights and counts of every term are its columns)
    logp_new  [B,T] with gradient; entropy [B,T] if a part requires it
    totals    the count of each term over the optimizer step: {"policy": ..., "distill": ..., <auxiliary>: ...}
    logits    [B,T,V] logits of the response tokens, or the columns `from_logits` made of them where they existed
    """
    terms = PolicyTerms(logp_new, batch, entropy=entropy, advantages=batch.advantages, all_reduce=all_reduce)
    terms.logits = logit_columns(parts, logits, batch)
    terms.advantages = parts.one("advantage").in_loss(terms)
    check_token_tensor(parts.one("advantage"), terms.advantages, logp_new, "in_loss")
    terms.ratio = parts.one("ratio")(terms)
    check_token_tensor(parts.one("ratio"), terms.ratio, logp_new)
    token_loss, metrics = _with_metrics(parts.one("clip"), terms)
    loss = reduce(token_loss, batch.loss_weight, totals[POLICY])
    divergence: Tensor | None = None
    for part in parts["distill"]:
        divergence = part(terms, divergence)
        check_token_tensor(part, divergence, logp_new)
    if divergence is not None:
        term = reduce(divergence, batch.distill_weight, totals[DISTILL])
        loss = loss + parts.distill_coef * term
        metrics["distill/loss"] = term.detach()
    for part in parts["auxiliary"]:
        token_loss = part(terms, None)
        check_token_tensor(part, token_loss, logp_new)
        term = reduce(token_loss, batch[f"{part.name}_weight"], totals[part.name])
        loss = loss + part.coef * term
        metrics[f"auxiliary/{part.name}"] = term.detach()
    return loss, metrics


def logit_columns(parts: Parts, logits: Tensor | Mapping[str, Tensor] | None, batch: RolloutBatch) -> dict[str, Tensor]:
    """The columns of every part's `from_logits`: made here from [B,T,V] logits, or passed on if the host made them."""
    if logits is None:
        return {}
    if isinstance(logits, Mapping):
        return dict(logits)
    out: dict[str, Tensor] = {}
    for part in parts.with_hook("from_logits"):
        out |= part.from_logits(logits, batch.token_columns())
    return out


def check_finite(name: str, logp: Tensor, batch: RolloutBatch) -> None:
    """Raise `DataError` naming the sample if `logp` [B,T] is NaN where the mask is on (waits for the device)."""
    bad = (torch.isnan(logp) & batch.response_mask).any(1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        where = f"row {row}"
        if batch.has("prompt_key"):
            where += f", prompt {batch.prompt_key[row]!r}"
        raise DataError(
            f"{name} is NaN on a model token of {where} ({int(bad.sum())} of {len(bad)} rows);"
            " the policy has diverged or the forward pass is broken: lower the learning rate or check the dtype"
        )


def _with_metrics(clip: Any, terms: PolicyTerms) -> tuple[Tensor, dict[str, Tensor]]:
    result = clip(terms)
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    check_token_tensor(clip, loss, terms.logp_new)
    return loss, {f"clip/{k}": v for k, v in metrics.items()}
