"""Function forms of the corrections."""

from __future__ import annotations

from typing import Any

from ...core.batch import RolloutBatch
from ...core.registry import create
from .building import reward_batch, tensor
from .correction_guide import FORMS as GUIDE_FORMS
from .correction_proximal import FORMS as PROXIMAL_FORMS

Result = dict[str, Any]


def tis(
    logp_old,
    logp_rollout,
    response_mask,
    level="token",
    upper=2.0,
    lower=None,
    nan_policy="one",
    batch_normalize=False,
    safety=20.0,
) -> Result:
    part = create(
        "correction",
        "tis",
        level=level,
        upper=upper,
        lower=lower,
        nan_policy=nan_policy,
        batch_normalize=batch_normalize,
        safety=safety,
    )
    batch = _batch(logp_old, logp_rollout, response_mask)
    found = part(batch)
    return {
        "weights": found["weight"],
        "mask": part.truncate(batch).live.long(),
        "ess": found["effective_sample_size"],
        "frac_truncated": found["truncated"],
    }


def ais(
    logp_old,
    logp_rollout,
    response_mask,
    kl_scale=0.05,
    power_ess=1.0,
    power_kl=1.0,
    power_cv=1.0,
    upper=2.0,
    ema=0.0,
    prev_alpha=None,
    combine="noisy_or",
) -> Result:
    part = create(
        "correction",
        "ais",
        kl_scale=kl_scale,
        power_ess=power_ess,
        power_kl=power_kl,
        power_cv=power_cv,
        upper=upper,
        ema=ema,
        combine=combine,
    )
    part.load_state_dict({"alpha": prev_alpha})
    batch = _batch(logp_old, logp_rollout, response_mask)
    found = part(batch)
    return {"weights": found.pop("weight"), **found}


def _batch(logp_old: Any, logp_rollout: Any, response_mask: Any) -> RolloutBatch:
    batch = reward_batch(response_mask=response_mask)
    return batch.with_columns(logp_old=tensor(logp_old), logp_rollout=tensor(logp_rollout))


FORMS = {"tis": tis, "ais": ais, **GUIDE_FORMS, **PROXIMAL_FORMS}
