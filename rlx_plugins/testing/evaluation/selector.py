"""Function forms of the token selectors, and of the aggregate that sets the weight of rows and tokens."""

from __future__ import annotations

from typing import Any

import torch

from ...core.batch import RolloutBatch
from ...core.objective import reduce
from ...core.registry import create
from ...core.terms import masked
from .building import reward_batch, tensor
from .selector_hint import FORMS as HINT_FORMS
from .selector_subset import FORMS as SUBSET_FORMS

Result = dict[str, Any]


def nat_urs(response_mask, u, p=0.5, per_token_loss=None, logp_grad=None) -> Result:
    """`logp_grad` [B,T]: gradient of each token's loss; returned as grad_logp, weighted."""
    batch = reward_batch(response_mask=response_mask, **{"uniform:nat_urs/keep": tensor(u)})
    weights = create("selector", "nat_urs", p=p)(batch)["weight"]
    out = {"keep": (weights != 0).long(), "weights": weights, **_reduced(batch, weights, per_token_loss)}
    if logp_grad is not None:
        out["grad_logp"] = masked(tensor(logp_grad), weights != 0) * weights
    return out


def nat_rpc(response_mask, u, min_prefix=1, per_token_loss=None, w_max=None) -> Result:
    batch = reward_batch(response_mask=response_mask, **{"uniform:nat_rpc/cut": tensor(u)})
    part = create("selector", "nat_rpc", min_prefix=min_prefix, w_max=w_max)
    columns = part(batch)
    return {
        "weights": columns["weight"],
        "cut": part.cut(batch),
        "model_input_len": columns["kept_length"],
        **_reduced(batch, columns["weight"], per_token_loss),
    }


def asyncweb_norm(
    episode_rewards,
    episode_group,
    row_episode,
    response_mask,
    mode="constant",
    k=10.0,
    eps=1e-6,
    ddof=0,
    logp_prox=None,
    logp_rollout=None,
    ratio_cap=5.0,
    logp_old=None,
) -> Result:
    """`logp_prox` may be given as logp_old; without both log-probs there is no cap."""
    prox = logp_prox if logp_prox is not None else logp_old
    episodes = reward_batch(episode_rewards, episode_group)
    z = create("advantage", "grpo", ddof=ddof, eps=eps)(episodes)["advantages"][:, 0]
    row = tensor(row_episode, torch.int64)
    batch = reward_batch(response_mask=response_mask).with_columns(episode=row)
    if prox is not None and logp_rollout is not None:
        batch = batch.with_columns(logp_old=tensor(prox), logp_rollout=tensor(logp_rollout))
    else:
        ratio_cap = None
    part = create("aggregate", "asyncweb_norm", mode=mode, k=k, ratio_cap=ratio_cap)
    columns = part(batch, batch.response_mask)
    n_steps = torch.ones_like(z)
    n_steps[row] = part.steps(batch, batch.response_mask)
    return {
        "episode_advantages": z,
        "advantages": z[row] * part.row_scale(batch, batch.response_mask),
        "token_weights": columns["weight"] / columns["count"].sum().clamp(min=1),
        "n_steps": n_steps,
    }


def _reduced(batch: RolloutBatch, weights: torch.Tensor, per_token_loss: Any) -> Result:
    """The share of tokens kept and the loss under both means, whose denominators are those of the full rows."""
    out: Result = {"kept_fraction": (weights != 0).sum() / batch.response_mask.sum().clamp(min=1).to(weights.dtype)}
    if per_token_loss is not None:
        for result, rule in {"loss_seq_mean": "seq_mean_token_mean", "loss_token_mean": "token_mean"}.items():
            columns = create("aggregate", rule)(batch, batch.response_mask)
            out[result] = reduce(tensor(per_token_loss), columns["weight"] * weights, columns["count"].sum())
    return out


FORMS = {"nat_urs": nat_urs, "nat_rpc": nat_rpc, "asyncweb_norm": asyncweb_norm, **HINT_FORMS, **SUBSET_FORMS}
