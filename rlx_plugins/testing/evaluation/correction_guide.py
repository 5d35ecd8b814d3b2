"""Function form of Guide's importance ratio: hinted behaviour, plain target."""

from __future__ import annotations

from typing import Any

import torch

from ...core.registry import create
from ...core.terms import clip_fraction
from .building import run_loss, tensor

Result = dict[str, Any]


def guide(
    logp_new,
    logp_old,
    logp_behaviour_hint=None,
    guided=None,
    response_mask=None,
    advantages=None,
    clip_low=0.2,
    clip_high=0.2,
    log_clamp=20.0,
    logp_rollout=None,
    eps_low=None,
    eps_high=None,
) -> Result:
    low = clip_low if eps_low is None else eps_low
    high = clip_high if eps_high is None else eps_high
    method = create("method", "guide", eps_low=low, eps_high=high, log_clamp=log_clamp).expand()
    parts = {kind: _create(kind, method[kind]) for kind in ("ratio", "clip")}
    mask, helped = tensor(response_mask).bool(), tensor(guided).bool()[:, None]
    hinted = tensor(logp_rollout if logp_behaviour_hint is None else logp_behaviour_hint)
    behavior = torch.where(helped, hinted, torch.full_like(hinted, torch.nan))
    adv = tensor(advantages)
    adv = adv[:, None].expand_as(mask) if adv.ndim == 1 else adv
    out = run_loss(
        parts,
        logp_new=logp_new,
        response_mask=response_mask,
        advantages=adv,
        logp_old=tensor(logp_old),
        logp_behavior=behavior,
    )
    share = clip_fraction(out["ratio"], adv, 1 - low, 1 + high, mask & helped)
    return {**out, "token_loss": out["per_token_loss"], "guided_clip_frac": share}


def _create(kind: str, spec: dict[str, Any]) -> Any:
    return create(kind, spec["name"], **{name: value for name, value in spec.items() if name != "name"})


FORMS = {"guide": guide}
