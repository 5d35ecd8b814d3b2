"""The batch phase: from a scored batch to weighted, credited rows. Whole batch, no gradient, every rank the same.

reward -> advantage -> drop keep=False -> correction -> aggregate -> selector
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .batch import RolloutBatch
from .config import Parts
from .errors import DataError
from .objective import POLICY, check_finite
from .returned import check_columns
from .terms import masked_mean


@dataclass
class Prepared:
    """What the batch phase returns.

    batch    the kept rows with `advantages`, `loss_weight` [B,T], `loss_count` [B] and the columns of every part;
             `row` [B] int64 is each row's position in the batch that came in
    metrics  numbers for the logger, under rlx/<name>
    """

    batch: RolloutBatch
    metrics: dict[str, float] = field(default_factory=dict)

    def counts(self) -> dict[str, Tensor]:
        """The count column [B] of every loss term; a host sums them over the rows of an optimizer step."""
        out = {POLICY: self.batch.loss_count}
        for name in self.batch:
            term = name.removesuffix("_count")
            if term != "loss" and term != name and f"{term}_weight" in self.batch:
                out[term] = self.batch[name]
        return out


@torch.no_grad()
def prepare(parts: Parts, batch: RolloutBatch) -> Prepared:
    """Run the batch phase. DataError: an infinite reward, a NaN logp_old, or no row that could be scored."""
    check_rewards(batch)
    if batch.has("logp_old"):
        check_finite("logp_old", batch.logp_old, batch)
    raw = batch.rewards
    metrics: dict[str, float] = {}
    batch = batch.with_columns(row=torch.arange(batch.size, device=batch.device))
    for part in parts["reward"]:
        batch = batch.with_columns(**_columns(part, batch, metrics))
    if parts.baseline == "kept":
        batch = _kept(batch)
    batch = _credit(parts, batch, metrics)
    if parts.baseline == "all":
        batch = _kept(batch)
    correction = torch.ones_like(batch.advantages)
    for part in parts["correction"]:
        columns = _columns(part, batch, metrics)
        correction = correction * columns.pop("weight")
        batch = batch.with_columns(**columns)
    batch = batch.with_columns(correction_weight=correction)
    rule = parts.one("aggregate")
    policy = rule(batch, batch.response_mask)
    check_columns(rule, policy, batch.response_mask)
    weight = policy["weight"] * correction
    batch = _other_terms(parts, batch)
    kept_length: Tensor | None = None
    for part in parts["selector"]:
        columns = _columns(part, batch, metrics)
        weight = weight * columns.pop("weight")
        if (cut := columns.pop("kept_length", None)) is not None:
            kept_length = cut if kept_length is None else torch.minimum(kept_length, cut)
        batch = batch.with_columns(**columns)
    batch = batch.with_columns(loss_weight=weight, loss_count=policy["count"])
    if kept_length is not None:
        batch = batch.with_columns(kept_length=kept_length)
    return Prepared(batch, metrics | _metrics(parts, batch, raw))


def check_rewards(batch: RolloutBatch) -> None:
    """Refuse an infinite reward, naming the sample, and a batch in which no row could be scored."""
    infinite = torch.isinf(batch.rewards)
    if batch.has("reward_components"):
        infinite = infinite | torch.isinf(batch.reward_components).any(1)
    if bool(infinite.any()):
        row = int(infinite.nonzero()[0, 0])
        where = f"row {row}" + (f", prompt {batch.prompt_key[row]!r}" if batch.has("prompt_key") else "")
        raise DataError(
            f"the reward of {where} is infinite ({batch.rewards[row]:g}); a reward function must return a finite"
            " number, or None where it can't score"
        )
    if bool(torch.isnan(batch.rewards).all()):
        raise DataError(
            f"none of the {batch.size} rollouts of this step could be scored: every reward is NaN"
            " (does a reward function answer None everywhere?)"
        )


def _kept(batch: RolloutBatch) -> RolloutBatch:
    """The rows with keep=True; the batch itself where that is all of them."""
    if bool(batch.keep.all()):
        return batch
    if not bool(batch.keep.any()):
        raise DataError("every row of this step was dropped (keep=False); there is nothing to train on")
    return batch.rows(batch.keep)


def _columns(part: Any, batch: RolloutBatch, metrics: dict[str, float]) -> dict[str, Any]:
    """What a part returns, with its numbers (statistics of the whole batch) also reported as <kind>/<name>/<key>."""
    returned: Mapping[str, Any] = _asked(part, batch)
    check_columns(part, returned, batch.response_mask)
    for key, value in returned.items():
        is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.ndim == 0)
        if is_number:
            metrics[f"{part.kind}/{part.name}/{key}"] = float(value)
    return dict(returned)


def _asked(part: Any, batch: RolloutBatch) -> Any:
    """The part's answer; an error of its own leaves with a note that names it, and signals that hold no numbers."""
    try:
        return part(batch)
    except Exception as error:
        lists = [name for name in sorted(part.requires) if batch.has(name) and isinstance(batch[name], list)]
        note = f"raised by {part.kind} {part.name}"
        error.add_note(f"{note}; not every row has a number in {', '.join(lists)}" if lists else note)
        raise


def _credit(parts: Parts, batch: RolloutBatch, metrics: dict[str, float]) -> RolloutBatch:
    part = parts.one("advantage")
    columns = _columns(part, batch, metrics)
    advantages = columns.pop("advantages")
    scorable = torch.isfinite(batch.rewards)[:, None] & batch.response_mask
    zero = torch.zeros((), dtype=advantages.dtype, device=advantages.device)
    return batch.with_columns(advantages=torch.where(scorable, advantages, zero), **columns)


def _other_terms(parts: Parts, batch: RolloutBatch) -> RolloutBatch:
    """Weights and counts of the distillation and auxiliary terms."""
    if parts["distill"]:
        rule = parts.one("distill_aggregate") or parts.one("aggregate")
        columns = rule(batch, batch.response_mask)
        batch = batch.with_columns(distill_weight=columns["weight"], distill_count=columns["count"])
    for part in parts["auxiliary"]:
        columns = part.aggregate(batch, part.mask(batch))
        batch = batch.with_columns(**{f"{part.name}_weight": columns["weight"], f"{part.name}_count": columns["count"]})
    return batch


def _metrics(parts: Parts, batch: RolloutBatch, raw: Tensor) -> dict[str, float]:
    mask = batch.response_mask
    tokens = mask.sum().clamp(min=1)
    metrics = {
        "unscorable": float(torch.isnan(raw).sum()),
        "advantage/abs_mean": float(batch.advantages.abs().sum() / tokens),
        "advantage/zero_rows": float((batch.advantages == 0).all(1).to(raw.dtype).mean()),
    }
    for part in parts["correction"]:
        metrics[f"correction/{part.name}/weight_mean"] = float(masked_mean(batch.correction_weight, mask))
    for part in parts["reward"]:
        metrics[f"reward/{part.name}/mean"] = float(batch.rewards.nanmean())
    if parts["selector"]:
        metrics["selector/kept_tokens"] = float((mask & (batch.loss_weight != 0)).sum(dtype=raw.dtype) / tokens)
    return metrics
