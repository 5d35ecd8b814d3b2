"""IAPO: a trajectory's advantage moved towards the turns whose results later turns used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Columns
from ..core.params import param
from ..core.registry import register
from ..core.terms import masked
from ._base import Base, OnBase
from ._ragged import ragged

STD_EPS = 1e-6
"""Added to the spread of a turn score; the paper's."""


class Evidence(NamedTuple):
    """Per row and turn [B,N]: tokens of the turn, the scores phi+ and phi-, and whether the row has that turn."""

    tokens: Tensor
    support: Tensor
    blame: Tensor
    there: Tensor


@register("advantage", "iapo")
@dataclass
class IAPO(OnBase):
    """Redistributes an agent's trajectory advantage over its turns by an evidence graph, in which an edge i -> j says
    that turn j used the result of turn i: in a success towards turns whose results supported later ones, in a failure
    towards erroneous turns that misled later ones. Sum over tokens and sign of the trajectory stay.

    phi+_i = log(1 + dplus_i + din_i), phi-_i = log(1 + e_i (1 + dminus_i + din_i)): dplus, dminus support and failed
    edges that leave turn i, din the support edges that enter it plus 1 if it uses the user's information directly, e
    its error flag. m(phi)_i = exp(clip(z_i, +-score_clip)) scaled to sum_i L_i m_i = L, z by mean and population std
    weighted with the turns' tokens L_i.
    A > 0:  w_i ~ m(phi+)_i exp(-error_penalty (phi-_i - mean)), scaled alike;   A < 0:  w_i = m(phi-)_i;
    A_it = w_i A.

    Reads turn_ids [B,T] (-1: not a model token), response_mask [B,T], what `base` reads (grpo in the paper) and, as one
    list per row: support_edges and failed_edges, pairs (i, j) with i < j; error and direct_user, one 0/1 per turn. A
    frozen language model or a rule draws the edges from the finished dialogue; None or an empty list is no annotation.
    Returns advantages [B,T], 0 where masked, outside turns and for unscorable rows.

    An edge counts once, edges to turns that do not exist are dropped, and a turn without tokens has no weight. Without
    any annotation this is the base. A base whose advantages differ within a row is weighted token by token, by the
    sign of its mean over the row; its sum over tokens is then not kept.
    """

    paper = "Influence-Aware Policy Optimization, arXiv 2608.24588"
    reads = frozenset({"turn_ids", "support_edges", "failed_edges", "error", "direct_user"})
    makes = frozenset({"trajectory_advantage"})

    error_penalty: float = param(0.05, ge=0, doc="weight of errors in a success; the paper's beta_pos")
    score_clip: float = param(0.25, gt=0, doc="bound on a turn score's z; the paper's c")
    base: Base = param("grpo", doc="estimator underneath; the paper's grpo")

    def __call__(self, batch: RolloutBatch) -> Columns:
        columns = dict(self.estimator(batch))
        turn = model_turns(batch)
        evidence = self.evidence(batch, turn)
        base = masked(columns["advantages"], turn >= 0)
        outcome = base.sum(1) / evidence.tokens.sum(1).clamp(min=1)
        weights = self.turn_weights(evidence, outcome)
        weight = torch.nn.functional.pad(weights, (1, 0)).gather(1, turn + 1)  # turn -1: the 0 in front
        return columns | {"advantages": base * weight, "trajectory_advantage": outcome}

    def evidence(self, batch: RolloutBatch, turn: Tensor | None = None) -> Evidence:
        """The turns of every row and their scores; `turn`: `model_turns` of the batch where they are at hand."""
        turn = model_turns(batch) if turn is None else turn
        error, flagged = ragged(batch, "error")
        direct, told = ragged(batch, "direct_user")
        turns = torch.stack([turn.amax(1) + 1, flagged, told]).amax(0)
        width = max(int(turns.max()), 1)
        there = torch.arange(width, device=turn.device) < turns[:, None]
        dtype = batch.dtype
        bin_of = (turn + 1).add_((width + 1) * torch.arange(len(turn), device=turn.device)[:, None])
        tokens = torch.bincount(bin_of.flatten(), minlength=len(turn) * (width + 1))
        tokens = tokens.view(len(turn), width + 1)[:, 1:].to(dtype)
        out, into = _degrees(batch.support_edges, there, dtype)
        misled, _ = _degrees(batch.failed_edges, there, dtype)
        into = into + _flags(direct, width)
        support = torch.log1p(out + into)
        blame = torch.log1p(_flags(error, width) * (1 + misled + into))
        return Evidence(tokens, support, blame, there)

    def turn_weights(self, evidence: Evidence, outcome: Tensor) -> Tensor:
        """w [B,N] by the sign of `outcome` [B]; 0 for turns without tokens."""
        tokens, support, blame, _ = evidence
        mean, _ = _mean_std(blame, tokens)
        success = self.multiplier(support, tokens) * torch.exp(-self.error_penalty * (blame - mean))
        success = _unit_mass(success, tokens)
        failure = self.multiplier(blame, tokens)
        sign = outcome[:, None]
        weights = torch.where(sign > 0, success, torch.where(sign < 0, failure, torch.ones_like(success)))
        return masked(weights, tokens > 0)

    def multiplier(self, score: Tensor, tokens: Tensor) -> Tensor:
        """m(phi) [B,N], bounded, with mean 1 over the row's tokens."""
        mean, std = _mean_std(score, tokens)
        z = (score - mean) / (std + STD_EPS)
        return _unit_mass(z.clamp(-self.score_clip, self.score_clip).exp(), tokens)


def model_turns(batch: RolloutBatch) -> Tensor:
    """[B,T] turn of every model token, -1 for the others and outside turns."""
    return torch.where(batch.response_mask, batch.turn_ids, -1).clamp_(min=-1)


def _mean_std(x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population std [B,1] of turn values [B,N], weighted by the turns' tokens."""
    total = tokens.sum(1, keepdim=True).clamp(min=1)
    mean = (x * tokens).sum(1, keepdim=True) / total
    return mean, ((x - mean).square() * tokens).sum(1, keepdim=True).div(total).sqrt()


def _unit_mass(x: Tensor, tokens: Tensor) -> Tensor:
    """`x` [B,N] scaled to mean 1 over the row's tokens."""
    mass = (x * tokens).sum(1, keepdim=True)
    return x * tokens.sum(1, keepdim=True) / torch.where(mass > 0, mass, torch.ones_like(mass))


def _degrees(edges: Iterable[Any], there: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """How many different edges leave and enter each turn [B,N]; one with an end outside the row's turns is dropped."""
    listed = sorted({(b, int(i), int(j)) for b, row in enumerate(edges) for i, j in (() if row is None else row)})
    b, i, j = torch.tensor(listed, dtype=torch.int64, device=there.device).reshape(-1, 3).unbind(1)
    width = there.shape[1]
    inside = (i >= 0) & (i < j) & (j < width)
    b, i, j = b[inside], i[inside], j[inside]
    known = there[b, j]
    count = torch.zeros(there.shape, dtype=dtype, device=there.device)
    one = torch.ones_like(b[known], dtype=dtype)
    leave = count.index_put((b[known], i[known]), one, accumulate=True)
    return leave, count.index_put((b[known], j[known]), one, accumulate=True)


def _flags(x: Tensor, width: int) -> Tensor:
    """[B,N] 0/1 of a ragged column, 0 where a row has no entry."""
    return torch.nn.functional.pad((torch.nan_to_num(x, nan=0.0) > 0).to(x.dtype), (0, width - x.shape[1]))
