"""The loss of one micro-batch in TRL's scaling, and the terms of TRL's own loss that plug-ins leave in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.batch import RolloutBatch
from ...core.objective import POLICY, reduce
from ...core.terms import masked
from ..loss_terms import ENTROPY
from .columns import PREFIX


def local_counts(chunk: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Tensor]:
    """The count of each loss term over one micro-batch of this rank."""
    counts = {term: chunk[PREFIX + column].sum() for term, column in columns.items()}
    counts[ENTROPY] = chunk[f"{PREFIX}response_mask"].sum().to(counts[POLICY].dtype)
    return counts


def window_totals(
    chunks: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    all_reduce: Callable[[Tensor], Tensor],
    ranks: int,
) -> dict[str, Tensor]:
    """The total of each loss term for the micro-batches of one optimizer step, on the scale of TRL's losses.

    The gradient that reaches the optimizer is the mean over ranks of the sum over micro-batches. A loss of
    sum(weight * token_loss) / (count over all ranks and micro-batches / ranks) in each of them therefore adds up to
    sum(weight * token_loss) / count over all rows of the step, however they are spread.
    """
    per_chunk = [local_counts(chunk, columns) for chunk in chunks]
    names = list(per_chunk[0])
    total = all_reduce(torch.stack([torch.stack([c[name] for c in per_chunk]).sum() for name in names]))
    divisors = torch.where(total > 0, total, torch.ones_like(total)) / ranks  # a rule that only sums has no count
    return {name: divisors[i] for i, name in enumerate(names)}


def with_micro_scope(
    totals: Mapping[str, Tensor], micro: frozenset[str], chunk: Mapping[str, Any], columns: Mapping[str, str], n: int
) -> dict[str, Tensor]:
    """The totals, but this micro-batch's own count times the number of micro-batches for terms of micro scope."""
    if not micro:
        return dict(totals)
    own = local_counts(chunk, columns)
    return {name: own[name] * n if name in micro else total for name, total in totals.items()}


def kl_to_reference(logp_new: Tensor, batch: RolloutBatch, bias_correction: bool) -> Tensor:
    """TRL's k3 estimate of KL(policy || reference) [B,T], 0 where masked; times the ratio to logp_old if corrected."""
    mask = batch.response_mask
    difference = masked(batch.logp_ref, mask) - masked(logp_new, mask)
    kl = difference.exp() - difference - 1
    return kl * (masked(logp_new, mask) - masked(batch.logp_old, mask)).exp() if bias_correction else kl


def host_terms(
    batch: RolloutBatch,
    logp_new: Tensor,
    entropy: Tensor,
    totals: Mapping[str, Tensor],
    *,
    beta: float,
    bias_correction: bool,
    entropy_coef: float,
) -> Tensor:
    """beta * KL - entropy_coef * entropy, as TRL adds them to its own loss.

    The KL is weighted and counted like the policy loss; the bonus is the mean entropy of the step's model tokens.
    """
    loss = logp_new.new_zeros(())
    if beta != 0.0:
        kl = kl_to_reference(logp_new, batch, bias_correction)
        loss = loss + beta * reduce(kl, batch.loss_weight, totals[POLICY])
    if entropy_coef != 0.0:
        loss = loss - entropy_coef * reduce(entropy, batch.response_mask.to(entropy.dtype), totals[ENTROPY])
    return loss
