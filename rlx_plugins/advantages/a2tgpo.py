"""A2TGPO: a turn's information gain beside the outcome."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.context import Context
from ..core.kinds import Advantage, Columns
from ..core.operations import Steps
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, wide, zscore
from ..core.terms import masked
from ..core.trajectory import Group
from ..hints._columns import column_tokens
from ._discounted import discounted_returns
from ._information_gain import information_gain
from ._ragged import ragged


@register("advantage", "a2tgpo")
@dataclass
class A2TGPO(Advantage):
    """Scores every turn but the last of an agent by how much it raised the policy's own probability of the gold answer,
    compared with the same turn of the other rollouts, and adds that, accumulated forward, to the outcome's z-score.

    IGn_it = (IG_it - mean) / (popstd + eps) over the rows of the group with a finite IG at turn t, 0 for a row alone;
    D_it = sum_{j=t}^{k_i - 1} discount^(j-t) IGn_ij / sqrt(k_i - t), with k_i the row's turns but the last;
    A_it = gain_coef D_it + O_i for t < k_i, O_i from the answer turn on;   O_i = (r_i - mean_g) / (std_g + eps).

    Reads turn_ids [B,T] (-1: not a model token), rewards [B] (NaN = unscorable), group [B], response_mask [B,T] and
    info_gain, per row one number (a difference of probabilities) for each turn but the last, NaN where it could not be
    scored: a list per row, or [B,K] with NaN behind. Returns advantages [B,T], 0 where masked and for unscorable rows,
    and `norm_ig` [B,T], the IGn of each token's turn (0 in the answer turn and outside), which `clip: a2tgpo` reads.

    With `column`, the dataset's gold answer, info_gain is made here at the end of the rollout, from one scoring pass
    per turn boundary under the current policy; without it, an agent's own rollout code has to return it.

    Reconstructed: the population std of the gains. The released code finds turns by equal neighbouring advantages,
    which merges two turns that happen to be equal; turn_ids are used here.
    """

    paper = "A2TGPO: agentic turn-group policy optimisation, arXiv 2605.06200"

    gain_coef: float = param(0.3, ge=0, doc="weight of the accumulated information gain; the code's alpha")
    discount: float = param(1.0, gt=0, le=1, doc="per turn; the code's gamma")
    eps: float = param(1e-6, gt=0, doc="added to both standard deviations; the code's")
    ddof_gain: int = param(0, ge=0, le=1, doc="0: population std of the gains; reconstructed")
    ddof_outcome: int = param(1, ge=0, le=1, doc="1: unbiased std of the rewards; verl's")
    column: str | None = param(None, doc="dataset column with the gold answer; None: the column info_gain is given")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"turn_ids"} if self.column else {"turn_ids", "info_gain"})

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"norm_ig", "info_gain"} if self.column else {"norm_ig"})

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"forward:logp"} if self.column else ())

    @property
    def token_columns(self) -> frozenset[str]:
        """Dataset columns the host gives as token ids."""
        return frozenset({self.column} if self.column else ())

    @property
    def idle_hooks(self) -> frozenset[str]:
        return frozenset() if self.column else frozenset({"annotate"})

    def annotate(self, groups: list[Group], ctx: Context) -> Steps:
        if not self.column:
            return
        rollouts = [r for g in groups for r in g.done()]
        answers = [column_tokens(self, g, self.column) for g in groups for _ in g.done()]
        gains = yield from information_gain(rollouts, answers)
        for rollout, gain in zip(rollouts, gains, strict=True):
            rollout.extras["info_gain"] = gain

    def __call__(self, batch: RolloutBatch) -> Columns:
        turns, _ = self.turn_advantages(batch)
        normalised = self.norm_ig(batch)[0]
        turn = batch.turn_ids
        live = batch.response_mask & (turn >= 0)
        at = turn.clamp(0, turns.shape[1] - 1)
        advantages = turns.gather(1, at)
        gain = torch.nn.functional.pad(normalised, (0, 1)).gather(1, at)
        return {"advantages": masked(advantages, live), "norm_ig": masked(gain, live)}

    def turn_advantages(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """A [B,K+1] of every turn, the outcome's alone from the answer turn on, and k [B], the turns before it."""
        normalised, turns = self.norm_ig(batch)
        outcome = zscore(batch.groups, wide(batch.rewards), self.eps, self.ddof_outcome)
        place = torch.arange(normalised.shape[1], device=normalised.device)
        left = (turns[:, None] - place).to(normalised.dtype)
        ahead = discounted_returns(normalised, left > 0, self.discount) / left.clamp(min=1).sqrt()
        return self.gain_coef * torch.nn.functional.pad(ahead, (0, 1)) + outcome[:, None], turns

    def norm_ig(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """IGn [B,K], 0 where a gain is missing or alone at its turn, and k [B], the number of gains of each row."""
        gains, turns = ragged(batch, "info_gain")
        return zscore(batch.groups, gains, self.eps, self.ddof_gain, counted(batch.rewards)), turns
