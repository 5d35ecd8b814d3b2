"""Function forms of credit for turns, trees, summaries, values, evidence and uncertainty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...advantages._tree import Tree
from ...core.batch import RolloutBatch
from ...core.registry import create
from ...core.segments import wide
from .building import only_given, per_row, reward_batch, tensor

Result = dict[str, Any]


def a2tgpo(
    rewards,
    group,
    turn_ids,
    info_gain,
    alpha=0.3,
    gamma=1.0,
    eps=1e-6,
    ddof_ig=0,
    ddof_outcome=1,
    beta=0.3,
    gain_coef=None,
    discount=None,
    ddof_gain=None,
    gain_scale=None,
    response_mask=None,
) -> Result:
    """`beta` (or gain_scale) is the clip's. Every token with a turn counts, unless `response_mask` says otherwise."""
    turns = tensor(turn_ids, torch.int64)
    mask = turns >= 0 if response_mask is None else response_mask
    batch = reward_batch(rewards, group, mask).with_columns(turn_ids=turns, info_gain=info_gain)
    part = create(
        "advantage",
        "a2tgpo",
        **{"gain_coef": alpha, "discount": gamma, "ddof_gain": ddof_ig}
        | only_given(gain_coef=gain_coef, discount=discount, ddof_gain=ddof_gain),
        eps=eps,
        ddof_outcome=ddof_outcome,
    )
    columns = part(batch)
    of_turn, k = part.turn_advantages(batch)
    normalised, _ = part.norm_ig(batch)
    clip = create("clip", "a2tgpo", gain_scale=beta if gain_scale is None else gain_scale)
    return {
        "advantages": columns["advantages"],
        "turn_advantages": [row[: n + 1] for row, n in zip(of_turn.tolist(), k.tolist())],
        "norm_ig": [row[:n] for row, n in zip(normalised.tolist(), k.tolist())],
        "clip_scale": clip.scale(columns["norm_ig"]),
    }


def arpo(
    rewards,
    group,
    node_ids,
    mode="hard",
    norm_by_std=True,
    eps=1e-6,
    ddof=1,
    singleton="raw",
    normalize=None,
    response_mask=None,
) -> Result:
    nodes = tensor(node_ids, torch.int64)
    batch = reward_batch(rewards, group, nodes >= 0 if response_mask is None else response_mask)
    part = create(
        "advantage",
        "arpo",
        tree="column",
        mode=mode,
        normalize=norm_by_std if normalize is None else normalize,
        eps=eps,
        ddof=ddof,
        singleton=singleton,
    )
    return part(batch.with_columns(node_ids=nodes))


def datpo(
    block_start,
    block_end,
    block_reward,
    block_embedding,
    block_ids=None,
    alpha0=0.2,
    alpha_end=0.0,
    step=0,
    total_steps=1,
    bonus_start=None,
    bonus_end=None,
) -> Result:
    """One prompt's tree. `advantages` and `keep_mask` need `block_ids`. Every terminal block is the end of a row."""
    blocks = len(block_start)
    parent_of_fork = {end: b for b, end in enumerate(block_end) if end != -1}
    parent = [parent_of_fork.get(start, -1) if start != -1 else -1 for start in block_start]
    leaves = [b for b, end in enumerate(block_end) if end == -1]
    given = tensor(block_ids, torch.int64) if block_ids is not None else torch.full((0, 1), -1)
    ends = [_ends_in(row, leaves) for row in given.tolist()]
    rest = [b for b in leaves if b not in ends]  # terminal blocks that no row shows
    ends += rest
    paths = [_path_to(b, parent) if b is not None else [] for b in ends]
    ids = torch.cat([given, torch.full((len(rest), given.shape[1]), -1)])
    embeddings = tensor(block_embedding).tolist()
    rewards = [float("nan") if b is None or block_reward[b] is None else float(block_reward[b]) for b in ends]
    batch = reward_batch(rewards, None, (ids >= 0).double())
    batch = RolloutBatch(
        {
            **batch,
            "node_ids": ids,
            "node_path": paths,
            "block_embedding": [[embeddings[b] for b in path] for path in paths],
        },
        step=step,
        total_steps=total_steps,
    )
    library = only_given(bonus_start=bonus_start, bonus_end=bonus_end)
    part = create("advantage", "datpo", tree="column", **{"bonus_start": alpha0, "bonus_end": alpha_end, **library})
    columns = part(batch)
    tree, credit = part.tree_credit(batch)
    at = tree.locate(torch.arange(blocks)[None].expand(batch.size, -1))[0]
    return {
        "block_advantages": tree.spread(credit.advantage, at),
        "base": tree.spread(credit.base, at),
        "diversity": tree.spread(credit.diversity, at),
        "alpha": columns["bonus_weight"],
        "advantages": columns["advantages"][: len(given)] if block_ids is not None else None,
        "keep_mask": columns["keep_mask"][: len(given)] if block_ids is not None else None,
    }


def _ends_in(row: list[int], leaves: list[int]) -> int | None:
    """The terminal block among a row's tokens."""
    return next((b for b in row if b in leaves), None)


def _path_to(block: int, parent: list[int]) -> list[int]:
    path = [block]
    while (above := parent[path[0]]) != -1:
        path.insert(0, above)
    return path


def elpo(
    node_parent, leaf, rewards, node_ids=None, lam=0.5, eps=1e-6, ddof=1, branch_weight=None, response_mask=None
) -> Result:
    """One prompt's tree. `advantages` needs `node_ids`."""
    paths = [_path_to(int(b), [int(p) for p in node_parent]) for b in leaf]
    nodes = tensor(node_ids, torch.int64) if node_ids is not None else torch.full((len(paths), 1), -1)
    mask = nodes >= 0 if response_mask is None else response_mask
    batch = reward_batch(rewards, None, tensor(mask)).with_columns(node_ids=nodes, node_path=paths)
    weight = lam if branch_weight is None else branch_weight
    part = create("advantage", "elpo", tree="column", branch_weight=weight, eps=eps, ddof=ddof)
    columns = part(batch)
    tree = _tree(batch, paths)
    credit = part.credit(tree, batch)
    at = tree.locate(torch.arange(len(node_parent))[None].expand(batch.size, -1))[0]
    reward = torch.where(at < tree.count, tree.spread(credit.reward, at), torch.nan)
    return {
        "node_reward": reward,
        "branch": tree.spread(credit.branch, at),
        "trajectory": tree.spread(credit.trajectory, at),
        "node_advantages": tree.spread(credit.advantage, at),
        "advantages": columns["advantages"] if node_ids is not None else None,
    }


def _tree(batch: RolloutBatch, paths: list[list[int]]) -> Tree:
    width = max(map(len, paths), default=0)
    return Tree(batch.groups, torch.tensor([p + [-1] * (width - len(p)) for p in paths]))


def resum(
    rewards,
    group,
    n_natural,
    n_artificial,
    is_artificial_branch=None,
    c_natural=0.2,
    c_artificial=0.05,
    eps=1e-4,
    ddof=1,
    split=True,
    natural_bonus=None,
    artificial_bonus=None,
    response_mask=None,
) -> Result:
    branch = [False] * len(rewards) if is_artificial_branch is None else is_artificial_branch
    batch = reward_batch(
        rewards,
        group,
        response_mask,
        n_natural=tensor(n_natural),
        n_artificial=tensor(n_artificial),
        is_artificial_branch=tensor(branch),
    )
    library = only_given(natural_bonus=natural_bonus, artificial_bonus=artificial_bonus)
    parameters = {"natural_bonus": c_natural, "artificial_bonus": c_artificial, **library}
    columns = create("advantage", "resum", **parameters, eps=eps, ddof=ddof, split=split)(batch)
    return {**columns, "advantages": per_row(columns["advantages"], response_mask)}


def rtmc(
    rewards,
    group,
    state_ids,
    action_ids,
    step_rewards=None,
    turn_ids=None,
    gamma=0.99,
    n_prior=2.0,
    normalize=False,
    discount=None,
    prior_count=None,
    singleton="raw",
    response_mask=None,
) -> Result:
    """`advantages` needs `turn_ids`."""
    turns = tensor(turn_ids, torch.int64) if turn_ids is not None else torch.full((len(rewards), 1), -1)
    mask = turns >= 0 if response_mask is None else response_mask
    batch = reward_batch(rewards, group, tensor(mask)).with_columns(
        turn_ids=turns, state_ids=state_ids, action_ids=action_ids, **only_given(step_rewards=step_rewards)
    )
    part = create(
        "advantage",
        "rtmc",
        discount=gamma if discount is None else discount,
        prior_count=n_prior if prior_count is None else prior_count,
        normalize=normalize,
        singleton=singleton,
    )
    steps, counts = part.step_advantages(batch)
    return {
        "step_advantages": [row[:n] for row, n in zip(steps.tolist(), counts.tolist())],
        "advantages": part(batch)["advantages"] if turn_ids is not None else None,
    }


def v05(
    rewards,
    group,
    value_prior,
    r_min=-1.0,
    r_max=1.0,
    scale="none",
    eps=1e-6,
    reward_min=None,
    reward_max=None,
    response_mask=None,
) -> Result:
    batch = reward_batch(rewards, group, response_mask).with_columns(value_prior=tensor(value_prior))
    limits = {"reward_min": r_min, "reward_max": r_max, **only_given(reward_min=reward_min, reward_max=reward_max)}
    columns = create("advantage", "v05", **limits, scale=scale, eps=eps)(batch)
    return {**columns, "advantages": per_row(columns["advantages"], response_mask)}


def sao(
    rewards,
    values,
    response_mask,
    alpha=1.5,
    gamma=1.0,
    lam=None,
    lam_critic=1.0,
    lambda_scale=None,
    discount=None,
    actor_lambda=None,
    critic_lambda=None,
    whiten=False,
) -> Result:
    """`rewards` [B], or [B,T] of the tokens."""
    given = tensor(rewards)
    per_token = {"token_rewards": given} if given.ndim == 2 else {}
    mask = tensor(response_mask)
    outcome = torch.where(mask.bool(), given, 0.0).sum(1) if per_token else given
    batch = reward_batch(outcome, torch.arange(len(given)), mask).with_columns(values=tensor(values), **per_token)
    card = {"lambda_scale": alpha, "discount": gamma, "actor_lambda": lam, "critic_lambda": lam_critic}
    library = only_given(
        lambda_scale=lambda_scale, discount=discount, actor_lambda=actor_lambda, critic_lambda=critic_lambda
    )
    columns = create("advantage", "sao", **{**card, **library}, whiten=whiten)(batch)
    return {"advantages": columns["advantages"], "lambda": columns["gae_lambda"], "returns": columns["returns"]}


def iapo(
    rewards,
    group,
    turn_ids,
    support_edges,
    failed_edges,
    error,
    direct_user,
    beta_pos=0.05,
    clip_c=0.25,
    eps=1e-6,
    ddof=1,
    error_penalty=None,
    score_clip=None,
    response_mask=None,
) -> Result:
    """Edges are triples (row, i, j)."""
    turns = tensor(turn_ids, torch.int64)
    rows = len(turns)
    batch = reward_batch(rewards, group, turns >= 0 if response_mask is None else response_mask).with_columns(
        turn_ids=turns,
        support_edges=_edges(support_edges, rows),
        failed_edges=_edges(failed_edges, rows),
        error=error if error is not None else [[]] * rows,
        direct_user=direct_user if direct_user is not None else [[]] * rows,
    )
    part = create(
        "advantage",
        "iapo",
        error_penalty=beta_pos if error_penalty is None else error_penalty,
        score_clip=clip_c if score_clip is None else score_clip,
        base={"name": "grpo", "eps": eps, "ddof": ddof},
    )
    columns = part(batch)
    evidence = part.evidence(batch)
    weights = part.turn_weights(evidence, columns["trajectory_advantage"])
    turns_of = evidence.there.sum(1).tolist()
    whole = batch.with_columns(response_mask=torch.ones_like(batch.response_mask))  # rows without tokens have one too
    return {
        "advantages": columns["advantages"],
        "weights": [row[:n] for row, n in zip(weights.tolist(), turns_of)],
        "trajectory_advantage": part.estimator(whole)["advantages"][:, 0],
    }


def _edges(triples: Any, rows: int) -> list[list[tuple[int, int]]]:
    listed: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
    for b, i, j in () if triples is None else triples:
        listed[int(b)].append((int(i), int(j)))
    return listed


def echo(
    advantages,
    entropy,
    confidence,
    response_mask,
    group=None,
    alpha=1.0,
    beta=1.0,
    s_max=2.0,
    mult_coeff=0.1,
    add_coeff=0.0,
    entropy_weight=None,
    confidence_weight=None,
    score_coef=None,
    additive_coef=None,
    **library,
) -> Result:
    """`advantages` [B] or [B,T] are those of the base estimator. `s_max` is score_clip in the library."""
    batch = reward_batch(None, group, response_mask).with_columns(
        entropy=tensor(entropy), confidence=tensor(confidence)
    )
    part = create(
        "advantage",
        "echo",
        entropy_weight=alpha if entropy_weight is None else entropy_weight,
        confidence_weight=beta if confidence_weight is None else confidence_weight,
        score_clip=library.get("score_clip", s_max),
        score_coef=mult_coeff if score_coef is None else score_coef,
        additive_coef=add_coeff if additive_coef is None else additive_coef,
    )
    base: Tensor = wide(tensor(advantages))
    base = base[:, None].expand_as(batch.entropy) if base.ndim == 1 else base
    score = part.score(batch)
    return {"advantages": part.shaped(base, score, batch), "score": score}


FORMS = {form.__name__: form for form in (a2tgpo, arpo, datpo, elpo, resum, rtmc, v05, sao, iapo, echo)}
