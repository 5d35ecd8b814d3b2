"""Function forms of the advantage estimators."""

from __future__ import annotations

from typing import Any

import torch

from ...core.objective import reduce
from ...core.registry import create
from .advantage_reshaped import FORMS as CREDIT_FORMS
from .advantage_turns import FORMS as TURN_FORMS
from .building import only_given, per_row, reward_batch, tensor

Result = dict[str, Any]


def grpo(rewards, group, scale="group", eps=1e-6, ddof=1, singleton="raw", response_mask=None, host=None) -> Result:
    batch = reward_batch(rewards, group, response_mask)
    part = create("advantage", "grpo", scale=scale, eps=eps, ddof=ddof, singleton=singleton, host=host)
    return {"advantages": per_row(part(batch)["advantages"], response_mask)}


def dr_grpo(
    rewards,
    group,
    token_loss=None,
    response_mask=None,
    loss_norm=None,
    batch_norm=None,
    singleton="raw",
    host=None,
    empty_rows="skip",
) -> Result:
    """Advantages [B], and the loss of `token_loss` under the paper's reduction: horizon loss_norm, batch_norm rows."""
    part = create("advantage", "dr_grpo", singleton=singleton, host=host)
    advantages = part(reward_batch(rewards, group))["advantages"][:, 0]  # of rows without model tokens too
    if token_loss is None:
        return {"advantages": advantages}
    rule = create("aggregate", "seq_mean_token_sum_norm", horizon=loss_norm, empty_rows=empty_rows)
    batch = reward_batch(rewards, group, response_mask)
    columns = rule(batch, batch.response_mask)
    total = columns["count"].sum() if batch_norm is None else batch_norm
    return {"advantages": advantages, "loss": reduce(tensor(token_loss), columns["weight"], total)}


def rloo(
    rewards,
    group,
    normalize=False,
    eps=1e-4,
    singleton="zero",
    kl=None,
    beta=0.0,
    reward_clip=None,
    kl_coef=None,
    host=None,
) -> Result:
    """`kl` [B]: KL of the whole sequence; here a sequence has one token."""
    batch = reward_batch(rewards, group)
    if kl is not None:
        kl = tensor(kl)[:, None]
        batch = batch.with_columns(logp_old=kl, logp_ref=torch.zeros_like(kl))
    part = create(
        "advantage",
        "rloo",
        normalize=normalize,
        eps=eps,
        singleton=singleton,
        kl_coef=(beta if kl_coef is None else kl_coef) if kl is not None else 0.0,
        reward_clip=reward_clip,
        host=host,
    )
    return {"advantages": part(batch)["advantages"][:, 0]}


def reinforce_pp(
    token_rewards,
    response_mask,
    group=None,
    gamma=1.0,
    baseline="none",
    singleton="zero",
    discount=None,
    eps=1e-8,
    host=None,
) -> Result:
    batch = reward_batch(group=group, response_mask=response_mask, token_rewards=token_rewards)
    part = create(
        "advantage",
        "reinforce_pp",
        discount=gamma if discount is None else discount,
        baseline=baseline,
        singleton=singleton,
        eps=eps,
        host=host,
    )
    columns = part(batch)
    return {"advantages": columns["advantages"], "returns": columns["returns"]}


def gdpo(
    reward_components,
    group,
    response_mask=None,
    weights=None,
    eps_group=1e-6,
    whiten="token",
    eps_batch=1e-8,
    singleton="raw",
    host=None,
) -> Result:
    batch = reward_batch(group=group, response_mask=response_mask, reward_components=reward_components)
    part = create(
        "advantage",
        "gdpo",
        weights=weights,
        eps_group=eps_group,
        whiten=whiten,
        eps_batch=eps_batch,
        singleton=singleton,
        host=host,
    )
    columns = part(batch)
    return {"advantages": per_row(columns["advantages"], response_mask), "summed": columns["summed"]}


def dvao(reward_components, group, weights=None, eps=1e-6, ddof=1, response_mask=None) -> Result:
    batch = reward_batch(group=group, response_mask=response_mask, reward_components=reward_components)
    columns = create("advantage", "dvao", weights=weights, eps=eps, ddof=ddof)(batch)
    return {
        "advantages": per_row(columns["advantages"], response_mask),
        "dynamic_weights": columns["dynamic_weights"],
    }


def gapo_snr(
    rewards,
    group,
    tau=0.5,
    norm_by_std=True,
    eps=1e-6,
    centre="median",
    singleton="raw",
    share=None,
    normalize=None,
    center=None,
    response_mask=None,
) -> Result:
    batch = reward_batch(rewards, group, response_mask)
    part = create(
        "advantage",
        "gapo_snr",
        share=tau if share is None else share,
        normalize=norm_by_std if normalize is None else normalize,
        center=centre if center is None else center,
        eps=eps,
        singleton=singleton,
    )
    columns = part(batch)
    return {"advantages": per_row(columns["advantages"], response_mask), "baseline": columns["baseline"]}


def avspo(
    rewards,
    group,
    state=None,
    alpha=0.5,
    r_anchor=0.1,
    tau_init=0.5,
    eta=0.01,
    tau_collapse=1e-6,
    eps=1e-8,
    response_mask=None,
    ladder_exponent=None,
    anchor_reward=None,
    initial_threshold=None,
    threshold_rate=None,
    collapse_std=None,
) -> Result:
    """`state`: {"tau", "prev_J"} of the step before. n_virtual: [group id, K] of every padded group."""
    batch = reward_batch(rewards, group, response_mask)
    library = only_given(
        ladder_exponent=ladder_exponent,
        anchor_reward=anchor_reward,
        initial_threshold=initial_threshold,
        threshold_rate=threshold_rate,
        collapse_std=collapse_std,
    )
    card = {
        "ladder_exponent": alpha,
        "anchor_reward": r_anchor,
        "initial_threshold": tau_init,
        "threshold_rate": eta,
        "collapse_std": tau_collapse,
    }
    part = create("advantage", "avspo", **{**card, **library}, eps=eps)
    if state:
        part.load_state_dict({"threshold": state.get("tau"), "previous_mean": state.get("prev_J")})
    columns = part(batch)
    added = torch.stack([batch.group, columns["virtual_samples"]], dim=1)
    return {
        "advantages": per_row(columns["advantages"], response_mask),
        "acr": columns["collapse_rate"],
        "tau": columns["collapse_threshold"],
        "prev_J": part.previous_mean,
        "n_virtual": added[added[:, 1] > 0].unique(dim=0).tolist(),
    }


def lead(
    reward_components,
    group,
    response_mask,
    weights=None,
    potential_alpha=1.0,
    ema=0.95,
    eps=1e-8,
    w_min=0.3,
    static=None,
    whiten=True,
    potential_exponent=None,
    decay=None,
    min_correct_weight=None,
    static_correct_weight=None,
) -> Result:
    """`weights`: the pair W before the step."""
    batch = reward_batch(group=group, response_mask=response_mask, reward_components=reward_components)
    part = create(
        "advantage",
        "lead",
        potential_exponent=potential_alpha if potential_exponent is None else potential_exponent,
        decay=ema if decay is None else decay,
        min_correct_weight=w_min if min_correct_weight is None else min_correct_weight,
        static_correct_weight=static if static_correct_weight is None else static_correct_weight,
        whiten=whiten,
        eps=eps,
    )
    if weights is not None:
        part.load_state_dict({"weights": tensor(weights).tolist()})
    columns = part(batch)
    w_correct, w_eff = columns["lead_weights"]
    return {
        "advantages": columns["advantages"],
        "target": list(columns["lead_target"]),
        "weights": list(part.weights),
        "w_correct": w_correct,
        "w_eff": w_eff,
    }


FORMS = (
    {form.__name__: form for form in (grpo, dr_grpo, rloo, reinforce_pp, gdpo, dvao, gapo_snr, avspo, lead)}
    | CREDIT_FORMS
    | TURN_FORMS
)
