"""ReSum: rollouts with a summary are compared with each other, and those without one among themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.context import Context
from ..core.errors import ConfigError, DataError
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import Segments, counted, wide, zscore
from ..core.trajectory import Group, Rollout

COUNTS = frozenset({"n_natural", "n_artificial", "is_artificial_branch"})


class Summaries(NamedTuple):
    """Per row [B]: reward with the format bonus, and whether the row has a summary."""

    total_reward: Tensor
    is_summary: Tensor


@register("advantage", "resum")
@dataclass
class ReSum(Advantage):
    """Teaches a model to summarise within long reasoning: a rollout with a summary is normalised among those of its
    group that have one, so that having one is neither rewarded nor punished in itself; a small bonus, larger for
    summaries the model began by itself, is added before.

    f_i = (natural_bonus n_nat + artificial_bonus n_art) / (n_nat + n_art), 0 without a summary;   R_i = r_i + f_i;
    S_i = n_nat + n_art > 0, or the row was made by injecting the phrase;
    A_i = (R_i - mean) / (std + eps) over the rows of the group with the same S; 0 in a subgroup of fewer than ddof + 1.

    Reads rewards [B] (NaN = unscorable), group [B], response_mask [B,T] and, per row [B], n_natural (summaries begun by
    the model), n_artificial (after an injected phrase) and is_artificial_branch. With `phrase` they are counted here
    at the end of the rollout: occurrences of these token ids in the model's own tokens, and hint segments that contain
    them; without it the columns are given. Returns advantages [B,T], 0 where masked and for unscorable rows;
    total_reward and is_summary [B]; constant_groups, the share of groups without any gradient. DataError for a negative
    count.

    This follows the paper; `split=False` is one comparison group for all, nearer to the README. Its two further knobs
    are not described. Reconstructed: eps and ddof (TRL's).
    """

    paper = "ReSum, arXiv 2606.13316"

    natural_bonus: float = param(0.2, ge=0, doc="format bonus of a summary the model began; the paper's c_natural")
    artificial_bonus: float = param(0.05, ge=0, doc="format bonus after an injected phrase; the paper's c_artificial")
    eps: float = param(1e-4, gt=0, doc="added to the standard deviation; TRL's")
    ddof: int = param(1, ge=0, le=1, doc="1: unbiased standard deviation; TRL's")
    split: bool = param(True, doc="rows with and without a summary apart; the paper")
    phrase: tuple[int, ...] | None = param(
        None, doc="token ids that begin a summary; None: the columns n_natural, n_artificial ... are given"
    )

    def check(self) -> None:
        if self.artificial_bonus > self.natural_bonus:
            raise ConfigError(
                f"advantage resum.artificial_bonus: must be <= natural_bonus ({self.natural_bonus:g}), got"
                f" {self.artificial_bonus:g}"
            )
        if self.phrase == ():
            raise ConfigError("advantage resum.phrase: expected at least one token id")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset() if self.phrase else COUNTS

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"total_reward", "is_summary"}) | (COUNTS if self.phrase else frozenset())

    @property
    def idle_hooks(self) -> frozenset[str]:
        return frozenset() if self.phrase else frozenset({"annotate"})

    def annotate(self, groups: list[Group], ctx: Context) -> None:
        if self.phrase:
            for rollout in (r for g in groups for r in g.done()):
                rollout.extras |= summary_counts(rollout, self.phrase)

    def __call__(self, batch: RolloutBatch) -> Columns:
        total, is_summary = self.summaries(batch)
        subgroup = batch.groups.index * 2 + is_summary.long() if self.split else batch.groups.index
        advantages = zscore(Segments(subgroup), total, self.eps, self.ddof)
        flat = batch.groups.max(advantages.abs()) == 0
        return {
            "advantages": batch.spread(advantages),
            "total_reward": total,
            "is_summary": is_summary,
            "constant_groups": flat.to(batch.dtype).mean(),
        }

    def summaries(self, batch: RolloutBatch) -> Summaries:
        """R (NaN for unscorable rows) and S."""
        rewards = wide(batch.rewards)
        natural, artificial = (_count(batch, name).to(rewards.dtype) for name in ("n_natural", "n_artificial"))
        n = natural + artificial
        bonus = (self.natural_bonus * natural + self.artificial_bonus * artificial) / n.clamp(min=1)
        total = torch.where(counted(rewards), rewards + bonus, torch.nan)
        return Summaries(total, (n > 0) | (_count(batch, "is_artificial_branch") > 0))


def summary_counts(rollout: Rollout, phrase: Sequence[int]) -> dict[str, int | bool]:
    """n_natural, n_artificial and is_artificial_branch of one rollout."""
    natural = artificial = 0
    injected = False
    run: list[int] = []
    for segment in rollout.segments:
        if segment.from_model:
            run += segment.tokens
            continue
        natural, run = natural + occurrences(run, phrase), []
        if segment.source == "hint" and (n := occurrences(segment.tokens, phrase)):
            artificial, injected = artificial + n, True
    natural += occurrences(run, phrase)
    return {"n_natural": natural, "n_artificial": artificial, "is_artificial_branch": injected}


def occurrences(tokens: Sequence[int], phrase: Sequence[int]) -> int:
    """How often `phrase` occurs in `tokens`, without overlaps."""
    return len(positions(tokens, phrase))


def positions(tokens: Sequence[int], phrase: Sequence[int]) -> list[int]:
    """Where `phrase` begins in `tokens`, without overlaps."""
    tokens, phrase = list(tokens), list(phrase)
    found: list[int] = []
    end = 0
    for at in [at for at, token in enumerate(tokens) if token == phrase[0]]:
        if at >= end and tokens[at : at + len(phrase)] == phrase:
            found.append(at)
            end = at + len(phrase)
    return found


def _count(batch: RolloutBatch, name: str) -> Tensor:
    """A column of counts [B], 0 where unknown (NaN)."""
    column = torch.as_tensor(batch[name], device=batch.device)
    counts = torch.nan_to_num(column.double(), nan=0.0)
    negative = (counts < 0).nonzero()
    if len(negative):
        raise DataError(f"advantage resum: {name} of row {int(negative[0, 0])} is negative ({counts[negative[0, 0]]})")
    return counts
