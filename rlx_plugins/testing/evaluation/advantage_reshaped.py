"""Function forms of estimators that reshape credit: by entropy, role, novelty, hint, evidence, twin, source, budget."""

from __future__ import annotations

from typing import Any

import torch

from ...core.errors import ConfigError
from ...core.registry import create
from ...core.terms import PolicyTerms
from .building import per_row, reward_batch, tensor

Result = dict[str, Any]


def hapo(
    rewards,
    group,
    response_mask,
    entropy,
    logp_new=None,
    logp_old=None,
    rho=0.8,
    beta=1.0,
    alpha=1.0,
    eps_low=0.2,
    eps_high=0.2,
    guard=5.0,
    eps=1e-6,
    repo_compat=False,
    quantile=None,
    signed=None,
) -> Result:
    """`redistributed` is None without the current policy's log-probs; fallback_groups: ids of groups under GRPO."""
    part = create(
        "advantage",
        "hapo",
        quantile=rho if quantile is None else quantile,
        beta=beta,
        alpha=alpha,
        eps_low=eps_low,
        eps_high=eps_high,
        guard=guard,
        eps=eps,
        signed=not repo_compat if signed is None else signed,
    )
    batch = reward_batch(rewards, group, response_mask, entropy=tensor(entropy))
    columns = part(batch)
    out: Result = {
        "advantages": columns["advantages"],
        "h": columns["entropy_score"],
        "fallback_groups": batch.group[columns["fallback"]].unique().tolist(),
        "redistributed": None,
    }
    if logp_new is not None and logp_old is not None:
        batch = batch.with_columns(logp_old=tensor(logp_old), **columns)
        terms = PolicyTerms(tensor(logp_new), batch, advantages=columns["advantages"])
        out["redistributed"] = part.in_loss(terms) if beta else terms.advantages
    return out


def sd_grpo(
    group,
    response_mask,
    segment_ids=None,
    boundary_mask=None,
    segment_rewards=None,
    reward_components=None,
    segment_weights=None,
    rewards=None,
    combine="sum_then_normalize",
    no_boundary="first",
    holistic_weight=0.0,
    scale="group",
    eps=1e-4,
    ddof=1,
    singleton="zero",
    role_ids=None,
) -> Result:
    """Roles from segment_ids (the library's role_ids) or boundary_mask; one of segment_rewards, reward_components."""
    roles = segment_ids if segment_ids is not None else role_ids
    if (roles is None) == (boundary_mask is None):
        raise ConfigError("sd_grpo: give segment_ids or boundary_mask, one of them")
    if (segment_rewards is None) == (reward_components is None):
        raise ConfigError("sd_grpo: give segment_rewards or reward_components, one of them")
    if reward_components is not None and segment_weights is None:
        raise ConfigError("sd_grpo: reward_components need segment_weights")
    batch = reward_batch(
        rewards,
        group,
        response_mask,
        reward_components,
        **_tensors(boundary_mask=boundary_mask, role_ids=roles, segment_rewards=segment_rewards),
    )
    part = create(
        "advantage",
        "sd_grpo",
        segment_weights=None if segment_rewards is not None else tensor(segment_weights).tolist(),
        roles="boundary" if roles is None else "role_ids",
        combine=combine,
        no_boundary=no_boundary,
        holistic_weight=holistic_weight,
        holistic="segments" if rewards is None else "rewards",
        scale=scale,
        eps=eps,
        ddof=ddof,
        singleton=singleton,
    )
    columns = part(batch)
    values = columns["segment_advantages"]
    return {
        "advantages": columns["advantages"],
        "segment_advantages": values,
        "segment_ids": part.token_roles(batch, values.shape[1]),
    }


def xrpo(
    rewards,
    group,
    logp_old,
    response_mask,
    lambda_novelty=2.5,
    kappa_clip=0.5,
    eps=1e-6,
    ddof=1,
    novelty_weight=None,
    max_bonus=None,
) -> Result:
    """Advantages [B], before they are masked: a row without tokens has the one its reward gives."""
    batch = reward_batch(rewards, group, response_mask, logp_old=tensor(logp_old))
    part = create(
        "advantage",
        "xrpo",
        novelty_weight=lambda_novelty if novelty_weight is None else novelty_weight,
        max_bonus=kappa_clip if max_bonus is None else max_bonus,
        base={"name": "grpo", "eps": eps, "ddof": ddof},
    )
    columns = part(batch)
    whole = batch.with_columns(response_mask=torch.ones_like(batch.response_mask))
    advantages = part.sharpened(part.estimator(whole)["advantages"], columns["novelty"])
    return {"advantages": advantages[:, 0], "novelty": columns["novelty"]}


def adhint(
    rewards,
    group,
    hinted=None,
    lam=0.5,
    eps=1e-6,
    pool="separate",
    r_max=1.0,
    helped=None,
    gap_weight=None,
    max_reward=None,
    response_mask=None,
) -> Result:
    """gap and weights [B]."""
    batch = reward_batch(rewards, group, response_mask, helped=tensor(hinted if hinted is not None else helped))
    part = create(
        "advantage",
        "adhint",
        gap_weight=lam if gap_weight is None else gap_weight,
        max_reward=r_max if max_reward is None else max_reward,
        eps=eps,
        pool=pool,
    )
    columns = part(batch)
    return {
        "advantages": per_row(columns["advantages"], response_mask),
        "gap": columns["difficulty_gap"],
        "weights": columns["difficulty_weight"],
    }


def aero(
    rewards,
    group,
    n_success=None,
    n_total=None,
    a0=1.0,
    b0=1.0,
    homogeneous="bernoulli",
    stats="kept",
    eps=1e-6,
    ddof=1,
    tol=1e-9,
    response_mask=None,
    prior_success=None,
    prior_failure=None,
    tolerance=None,
    success_threshold=0.5,
) -> Result:
    batch = reward_batch(rewards, group, response_mask, **_tensors(n_success=n_success, n_total=n_total))
    part = create(
        "advantage",
        "aero",
        prior_success=a0 if prior_success is None else prior_success,
        prior_failure=b0 if prior_failure is None else prior_failure,
        homogeneous=homogeneous,
        stats=stats,
        eps=eps,
        ddof=ddof,
        tolerance=tol if tolerance is None else tolerance,
        success_threshold=success_threshold,
    )
    columns = part(batch)
    return {
        "advantages": per_row(columns["advantages"], response_mask),
        "posterior_mean": columns["posterior_mean"],
    }


def cipo(
    rewards,
    rewards_cf=None,
    group=None,
    response_mask=None,
    decision_mask=None,
    lam=0.5,
    bound=1.0,
    apply_to="all",
    eps=1e-6,
    ddof=1,
    twin_rewards=None,
    twin_weight=None,
    difference_bound=None,
    singleton="raw",
) -> Result:
    """A group of one keeps its raw reward, as in verl."""
    twins = rewards_cf if rewards_cf is not None else twin_rewards
    batch = reward_batch(rewards, group, response_mask, **_tensors(twin_rewards=twins, decision_mask=decision_mask))
    part = create(
        "advantage",
        "cipo",
        twin_weight=lam if twin_weight is None else twin_weight,
        difference_bound=bound if difference_bound is None else difference_bound,
        apply_to=apply_to,
        base={"name": "grpo", "eps": eps, "ddof": ddof, "singleton": singleton},
    )
    columns = part(batch)
    return {"advantages": columns["advantages"], "paired_difference": columns["paired_difference"]}


def erils(
    rewards,
    group,
    is_external=None,
    lengths=None,
    target_length=None,
    n_external=None,
    ext_weight=1.0,
    homogeneous="zero",
    const_baseline=0.5,
    eps=1e-6,
    ddof=1,
    mode="separate",
    response_mask=None,
    external=None,
    max_external=None,
    external_weight=None,
    constant_baseline=None,
    statistics=None,
) -> Result:
    """Lengths in tokens, or those of response_mask; n_external acts where there is a target_length."""
    if lengths is not None:
        counts = tensor(lengths).long()
        response_mask = (torch.arange(max(1, int(counts.max()))) < counts[:, None]).double()
    flags = is_external if is_external is not None else external
    batch = reward_batch(rewards, group, response_mask, external=tensor(flags))
    most = n_external if max_external is None else max_external
    part = create(
        "advantage",
        "erils",
        target_length=target_length,
        max_external=None if target_length is None else most,
        external_weight=ext_weight if external_weight is None else external_weight,
        homogeneous=homogeneous,
        constant_baseline=const_baseline if constant_baseline is None else constant_baseline,
        eps=eps,
        ddof=ddof,
        statistics=mode if statistics is None else statistics,
    )
    columns = part(batch)
    return {"advantages": _of_rows(columns["advantages"]), "keep": columns["external_kept"]}


def hbpo(
    rewards, group, subgroup=None, baseline=None, eps=1e-6, use_intra=True, budget=None, budget_baseline=None
) -> Result:
    """`inter` and `intra` are the parts before the sum: intra is there without use_intra too, where it is not added."""
    level = subgroup if subgroup is not None else budget
    paid = baseline if baseline is not None else budget_baseline
    batch = reward_batch(rewards, group, **_tensors(budget=level, budget_baseline=paid))
    part = create("advantage", "hbpo", eps=eps, use_intra=use_intra)
    columns = part(batch)
    return {
        "advantages": columns["advantages"][:, 0],
        "inter": columns["inter_budget"],
        "intra": columns["intra_budget"] if level is None or paid is None else part.intra(batch, batch.rewards),
    }


def cadence(
    rewards,
    correct,
    group,
    response_mask,
    lambda_r=1.0,
    lambda_lap=0.5,
    eta=0.5,
    reward_coef=None,
    brevity_coef=None,
    length_slope=None,
) -> Result:
    batch = reward_batch(rewards, group, response_mask, correct=tensor(correct))
    part = create(
        "advantage",
        "cadence",
        reward_coef=lambda_r if reward_coef is None else reward_coef,
        brevity_coef=lambda_lap if brevity_coef is None else brevity_coef,
        length_slope=eta if length_slope is None else length_slope,
    )
    columns = part(batch)
    return {
        "advantage": columns["advantages"],
        "advantages": columns["advantages"],
        "baseline": columns["centred_reward"],
        "brevity": columns["brevity"],
    }


def _tensors(**columns: Any) -> dict[str, torch.Tensor]:
    """The columns that are given."""
    return {name: tensor(values) for name, values in columns.items() if values is not None}


def _of_rows(advantages: torch.Tensor) -> torch.Tensor:
    """[B,T] advantages that are one value per row -> [B]; 0 for a row without tokens."""
    return advantages.gather(1, advantages.abs().argmax(1, keepdim=True))[:, 0]


FORMS = {form.__name__: form for form in (hapo, sd_grpo, xrpo, adhint, aero, cipo, erils, hbpo, cadence)}
