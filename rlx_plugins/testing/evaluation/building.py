"""Batches and loss terms from nested lists, as the function forms need them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.batch import RolloutBatch
from ...core.config import Parts
from ...core.kinds import DEFAULTS, Plugin
from ...core.objective import policy_loss
from ...core.registry import create


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """Nested lists (None = NaN), arrays or tensors as a tensor."""
    if isinstance(values, Tensor):
        return values.detach().to(dtype)
    return torch.tensor(_with_nan(values), dtype=dtype)


def _with_nan(values: Any) -> Any:
    if isinstance(values, (list, tuple)):
        return [_with_nan(v) for v in values]
    return float("nan") if values is None else values


def only_given(**values: Any) -> dict[str, Any]:
    """The arguments that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def reward_batch(
    rewards: Any = None,
    group: Any = None,
    response_mask: Any = None,
    reward_components: Any = None,
    **columns: Any,
) -> RolloutBatch:
    """A batch for the batch phase; without a mask every row has one token, without groups all rows share one."""
    given = {k: tensor(v) if isinstance(v, (list, tuple)) else v for k, v in columns.items() if v is not None}
    if reward_components is not None:
        given["reward_components"] = tensor(reward_components)
        given.setdefault("rewards", given["reward_components"].nansum(1))
    if rewards is not None:
        given["rewards"] = tensor(rewards)
    size = len(given["rewards"]) if "rewards" in given else len(response_mask)
    given.setdefault("rewards", torch.zeros(size, dtype=torch.float64))
    mask = torch.ones(size, 1) if response_mask is None else tensor(response_mask)
    given["response_mask"] = mask.bool()
    given["group"] = torch.zeros(size, dtype=torch.int64) if group is None else tensor(group, torch.int64)
    given.setdefault("row_id", torch.arange(size))
    given.setdefault("keep", torch.ones(size, dtype=torch.bool))
    return RolloutBatch(given)


def per_row(advantages: Tensor, response_mask: Any) -> Tensor:
    """[B,T] advantages as the function form returns them: [B] when it was not given a mask."""
    return advantages[:, 0] if response_mask is None else advantages


def run_loss(
    parts: Mapping[str, Plugin | None],
    *,
    logp_new: Any,
    response_mask: Any,
    advantages: Any,
    agg: str | Plugin = "token-mean",
    correction: Any = None,
    total: float | None = None,
    **columns: Any,
) -> dict[str, Any]:
    """Loss phase of one micro-batch that is the whole batch, through `policy_loss`.

    Returns loss, per_token_loss [B,T] (0 where masked), grad_logp [B,T] = d loss / d logp_new, and the clip's metrics.
    `agg`: the name of an aggregate (dashes or underscores) or the plug-in; `correction` multiplies the token weights;
    `total` replaces the sum of the counts.
    """
    mask = tensor(response_mask).bool()
    live = tensor(logp_new).requires_grad_()
    adv = tensor(advantages)
    adv = adv[:, None].expand_as(mask) if adv.ndim == 1 else adv
    given = {k: tensor(v) if isinstance(v, (list, tuple)) else v for k, v in columns.items() if v is not None}
    batch = reward_batch(response_mask=mask.double()).with_columns(advantages=adv, **given)
    chosen = {kind: parts.get(kind) or create(kind, name) for kind, name in DEFAULTS.items() if kind != "aggregate"}
    rule = create("aggregate", agg.replace("-", "_")) if isinstance(agg, str) else agg
    columns_out = rule(batch, mask)
    weight = columns_out["weight"] if correction is None else columns_out["weight"] * tensor(correction)
    batch = batch.with_columns(loss_weight=weight, loss_count=columns_out["count"])
    seen: dict[str, Tensor] = {}
    clip = chosen["clip"]

    def watched(terms: Any) -> Any:
        out = clip(terms)
        seen["loss"] = out[0] if isinstance(out, tuple) else out
        seen["ratio"] = terms.ratio
        return out

    run = Parts({kind: [part] for kind, part in chosen.items()} | {"aggregate": [rule], "clip": [watched]})
    loss, metrics = policy_loss(
        run, batch, live, totals={"policy": columns_out["count"].sum() if total is None else total}
    )
    (grad,) = torch.autograd.grad(loss, live, allow_unused=True)
    zero = torch.zeros((), dtype=torch.float64)
    return {
        "loss": loss.detach(),
        "per_token_loss": torch.where(mask, seen["loss"].detach(), zero),
        "grad_logp": torch.zeros_like(live) if grad is None else torch.where(mask, grad, zero),
        "ratio": torch.where(mask, seen["ratio"].detach(), zero),
        **{name.removeprefix("clip/"): value for name, value in metrics.items()},
    }
