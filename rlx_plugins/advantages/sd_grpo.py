"""SD-GRPO: one advantage per role of a rollout's tokens, each compared by its own reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import ConfigError, DataError
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import Segments, counted, wide, zscore
from ..core.terms import masked
from ._ragged import ragged
from ._token_column import token_column

RoleWeights = tuple[dict[str, float] | tuple[float, ...], ...]
"""For each role the weights of the reward components: by name (others 0), or one per component in the batch's order."""

DYNFRAME: RoleWeights = ({"span": 1.0, "fps": 1.0}, {"answer": 1.0, "format": 1.0})
"""Role 0 finds the frames, everything up to and with `</fps>`; role 1 answers."""


@register("advantage", "sd_grpo")
@dataclass
class SDGRPO(Advantage):
    """Splits a rollout's tokens into roles ("where to look", then "what is the answer") and compares each, within the
    prompt's group, by its own reward only: good retrieval before a wrong answer is not punished, nor the reverse.

    r_is = sum_k W[s,k] c_ik,   z_is = (r_is - mean_gs) / (std_gs + eps) over the rows with a finite r_is, 0 without;
    A_is = (1 - holistic_weight) z_is + holistic_weight h_i,   A[b,t] = A_{b, role[b,t]}.

    Reads group [B], response_mask [B,T]; reward_components [B,K] with component_names, or with segment_weights=None the
    column segment_rewards [B,S]; rewards [B] for h. Roles come from, by `roles`:
    "boundary": the number of boundary tokens before a token, at most S-1, from boundary_mask [B,T] (1 on the last token
    of each boundary marker) or, with `boundary_tokens`, found in response_ids; a boundary belongs to the earlier role;
    "turn_ids": the model turn, at most S-1;   "role_ids": the column role_ids [B,T], -1 = no role (advantage 0).
    Returns advantages [B,T], 0 where masked, and `segment_advantages` [B,S], A_is. Raises DataError for a role id
    beyond S-1, naming row and position.

    A row is left out of the statistics of those segments only for which it has no finite reward. The published trainer
    broadcasts one scalar; normalising per segment is its figure's rule, and missing rewards, rows without a boundary
    and the blend (of arXiv 2606.09871) are reconstructed. The objective is a mean over rows of row means
    (aggregate=seq_mean_token_mean), in which a short first segment weighs little. The paper's script mixes
    with combine="normalize_then_sum".
    """

    paper = (
        "DynFrame: Adaptive Reasoning-Driven Multimodal Framework with Dynamic Frame Augmentation for Complex Video "
        "Understanding, arXiv 2605.26680"
    )
    provides = frozenset({"segment_advantages"})

    segment_weights: RoleWeights | None = param(DYNFRAME, ge=0, doc="W; None: column segment_rewards; paper's figure")
    roles: Literal["boundary", "role_ids", "turn_ids"] = param("boundary", doc="where the tokens' roles come from")
    boundary_tokens: tuple[int, ...] | None = param(None, doc="token ids of the boundary marker; None: boundary_mask")
    combine: Literal["sum_then_normalize", "normalize_then_sum"] = param("sum_then_normalize", doc="TRL's names")
    no_boundary: Literal["first", "last"] = param("first", doc="role of rows without a boundary; reconstructed")
    holistic_weight: float = param(0.0, ge=0, le=1, doc="share of the whole row's z-score; 2606.09871; 0: DynFrame")
    holistic: Literal["rewards", "segments"] = param("rewards", doc="what h scores: rewards, or the segments' sum")
    scale: Literal["group", "none"] = param("group", doc="whose standard deviation divides; code")
    eps: float = param(1e-4, gt=0, doc="added to the standard deviation; TRL")
    ddof: int = param(1, ge=0, le=1, doc="1: unbiased standard deviation; code")
    singleton: Literal["zero", "raw"] = param("zero", doc="a lone reward of a segment: 0, or the reward itself")

    def check(self) -> None:
        for s, row in enumerate(self.segment_weights or ()):
            if not any(w > 0 for w in (row.values() if isinstance(row, dict) else row)):
                raise ConfigError(f"advantage sd_grpo.segment_weights[{s}]: at least one must be above 0, got {row}")
        if self.segment_weights is not None and not self.segment_weights:
            raise ConfigError("advantage sd_grpo.segment_weights: at least one role, got none")
        if self.boundary_tokens is not None and (self.roles != "boundary" or not self.boundary_tokens):
            raise ConfigError(f"advantage sd_grpo.boundary_tokens: ids for roles='boundary', got roles={self.roles!r}")

    @property
    def requires(self) -> frozenset[str]:
        needed = {"segment_rewards"} if self.segment_weights is None else {"reward_components", "component_names"}
        if self.roles != "boundary":
            needed.add(self.roles)
        elif self.boundary_tokens is None:
            needed.add("boundary_mask")
        return frozenset(needed)

    @property
    def credits(self) -> str:  # type: ignore[override]
        return "segment_rewards" if self.segment_weights is None else "reward_components"

    def __call__(self, batch: RolloutBatch) -> Columns:
        rewards = self.segment_rewards(batch)
        values = self._normalised(batch.groups, rewards)
        if self.holistic_weight:
            whole = wide(batch.rewards) if self.holistic == "rewards" else _finite_sum(rewards)
            shared = self._normalised(batch.groups, whole)[:, None]
            values = (1 - self.holistic_weight) * values + self.holistic_weight * shared
        role = self.token_roles(batch, rewards.shape[1])
        advantages = torch.nn.functional.pad(values, (1, 0)).gather(1, role + 1)  # role -1: the 0 in front
        return {"advantages": advantages, "segment_advantages": values}

    def segment_rewards(self, batch: RolloutBatch) -> Tensor:
        """r [B,S], NaN where a row has no score for a segment."""
        if self.segment_weights is None:
            return ragged(batch, "segment_rewards")[0]
        components = wide(batch.reward_components)
        weights = self._weights(batch)
        finite = counted(components)
        if self.combine == "normalize_then_sum":
            components = zscore(batch.groups, components, self.eps, self.ddof)
        scored = finite.to(weights.dtype) @ (weights > 0).to(weights.dtype).T > 0
        total = masked(components, finite) @ weights.T
        return torch.where(scored, total, torch.full_like(total, torch.nan))

    def _weights(self, batch: RolloutBatch) -> Tensor:
        """W [S,K]."""
        count, assigned = batch.reward_components.shape[1], self.segment_weights or ()
        names = tuple(batch.component_names) if batch.has("component_names") else ()
        rows = []
        for s, row in enumerate(assigned):
            label = f"advantage sd_grpo.segment_weights[{s}]"
            if isinstance(row, dict):
                if not set(row) <= set(names):
                    raise ConfigError(f"{label}: the reward components are {sorted(names)}, the weights {sorted(row)}")
                row = tuple(row.get(name, 0.0) for name in names)
            if len(row) != count:
                raise ConfigError(f"{label}: {len(row)} weights for {count} reward components")
            rows.append(row)
        return torch.tensor(rows, dtype=wide(batch.reward_components).dtype, device=batch.device)

    def _normalised(self, groups: Segments, x: Tensor) -> Tensor:
        """z of [B] or [B,S] rewards within their group, 0 where not finite."""
        mean, std, n = groups.mean_std(x, ddof=self.ddof)
        if self.singleton == "raw":
            alone = (n <= self.ddof) & (n > 0)
            mean, std = masked(mean, ~alone), torch.where(alone, torch.ones_like(std), std)
        values = x - groups.spread(mean)
        if self.scale == "group":
            values = values / (groups.spread(std) + self.eps)
        return masked(values, counted(x))

    def token_roles(self, batch: RolloutBatch, count: int) -> Tensor:
        """[B,T] int64: 0..count-1, -1 where masked and for tokens without a role."""
        mask = batch.response_mask
        if self.roles == "boundary":
            role = self._after_boundaries(batch, count)
        elif self.roles == "turn_ids":
            role = batch.turn_ids.clamp(-1, count - 1)
        else:
            role = token_column(batch, "role_ids", fill=-1).long().clamp(min=-1)
            beyond = (role >= count) & mask
            if bool(beyond.any()):
                row, place = beyond.nonzero()[0].tolist()
                raise DataError(
                    f"row {row}, response position {place}: role id {int(role[row, place])}, but there are"
                    f" {count} roles"
                )
        return torch.where(mask, role, -1)

    def _after_boundaries(self, batch: RolloutBatch, count: int) -> Tensor:
        mask = batch.response_mask
        if self.boundary_tokens is None:
            ends = token_column(batch, "boundary_mask").bool()
        else:
            ends = _marker_ends(batch.response_ids, self.boundary_tokens)
        ends = ends & mask
        behind = torch.zeros_like(ends)  # the first token behind each boundary
        behind[:, 1:] = ends[:, :-1]
        before = behind.cumsum(1).clamp_(max=count - 1)
        if self.no_boundary == "first":
            return before
        return torch.where(ends.any(1, keepdim=True), before, count - 1)


def _marker_ends(ids: Tensor, marker: tuple[int, ...]) -> Tensor:
    """[B,T] bool: the last token of each occurrence of `marker`."""
    ends = ids == marker[-1]
    for back, token in enumerate(reversed(marker[:-1]), 1):
        ends[:, back:] &= ids[:, :-back] == token
        ends[:, :back] = False
    return ends


def _finite_sum(rewards: Tensor) -> Tensor:
    """[B] sums of the finite entries of [B,S]; NaN for a row without any."""
    finite = counted(rewards)
    total = masked(rewards, finite).sum(1)
    return torch.where(finite.any(1), total, torch.full_like(total, torch.nan))
