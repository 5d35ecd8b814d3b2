"""Function form of ADHint's weights inside hints."""

from __future__ import annotations

from typing import Any

from ...core.registry import create
from .building import reward_batch, tensor

Result = dict[str, Any]


def adhint(
    hint_mask,
    response_mask,
    entropy,
    advantages,
    tau=1.0,
    eps=1e-8,
    modulate=True,
    preserve=True,
    tolerance=None,
) -> Result:
    batch = reward_batch(response_mask=response_mask, hint_mask=tensor(hint_mask), entropy=tensor(entropy))
    given = tensor(advantages)
    batch = batch.with_columns(advantages=given[:, None].expand_as(batch.response_mask) if given.ndim == 1 else given)
    part = create(
        "selector",
        "adhint",
        tolerance=tau if tolerance is None else tolerance,
        eps=eps,
        modulate=modulate,
        preserve=preserve,
    )
    return {"weights": part(batch)["weight"]}


FORMS = {"adhint": adhint}
