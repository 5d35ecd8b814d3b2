"""ECHO: updates concentrate on tokens of high entropy and low confidence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, wide
from ..core.terms import masked
from ._base import Base, OnBase
from ._confidence import Confidence, token_confidence

VARIANCE_EPS = 1e-8
"""Added to a variance before its root; released code."""


@register("advantage", "echo")
@dataclass
class ECHO(OnBase):
    """Multiplies each token's advantage by 1 + 0.1 S, with S high where the policy was uncertain: real decision points
    move more than tokens it was sure of. Made for test-time training on majority votes.

    white(x) = (x - mean) / sqrt(var + 1e-8) over all tokens of the batch (unbiased variance; 0 for one token);
    S = clip(entropy_weight white(H) + confidence_weight white(1 - clip(C, 0, 1)), +-score_clip);
    A' = A (1 + score_coef S) + additive_coef (S - mean of S over the tokens of the row's group).

    Reads entropy [B,T] (nats), the confidence C [B,T] of the policy that starts the step, rewards [B] (NaN =
    unscorable), group [B], response_mask [B,T] and what `base` reads; returns advantages [B,T], 0 where masked, and
    `echo_score` [B,T], S. Tokens of unscorable rows enter no statistic. A group of advantage 0 keeps it unless
    `additive_coef` is set; signs stay as long as score_coef * score_clip < 1.

    C is the column confidence [B,T], a list of numbers per row or a tensor: the sum of the policy's five largest
    probabilities, from an engine that reports them. The released code takes their mean, at most 0.2 and almost
    constant. confidence="sampled" takes the probability of the sampled token, exp(logp_old), which every host has.
    """

    paper = "Entropy Confidence Hybrid Group Relative Policy Optimization, arXiv 2602.02150"
    makes = frozenset({"echo_score"})
    scope = "batch"

    entropy_weight: float = param(1.0, ge=0, doc="weight of the entropy in S; the code's alpha")
    confidence_weight: float = param(1.0, ge=0, doc="weight of 1 - confidence in S; the code's beta")
    score_clip: float | None = param(2.0, gt=0, doc="bound on |S|; the code's s_max; None: none")
    score_coef: float = param(0.1, ge=0, doc="how much S scales an advantage; the code's mult_coeff")
    additive_coef: float = param(0.0, doc="how much S adds to an advantage; the code's add_coeff")
    confidence: Confidence = param("column", doc="top-5 mass from the column confidence, or the sampled token's")
    base: Base = param("grpo", doc="estimator underneath; the paper's grpo")

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"entropy", "confidence" if self.confidence == "column" else "logp_old"})

    def __call__(self, batch: RolloutBatch) -> Columns:
        columns = dict(self.estimator(batch))
        score = self.score(batch)
        return columns | {"advantages": self.shaped(columns["advantages"], score, batch), "echo_score": score}

    def score(self, batch: RolloutBatch) -> Tensor:
        """S [B,T], 0 where masked and for unscorable rows."""
        live = batch.response_mask & counted(batch.rewards)[:, None]
        entropy, confidence = wide(batch.entropy), token_confidence(batch, self.confidence)
        score = self.entropy_weight * _white(entropy, live & torch.isfinite(entropy))
        score = score + self.confidence_weight * _white(1 - confidence, live)
        return score if self.score_clip is None else score.clamp(-self.score_clip, self.score_clip)

    def shaped(self, advantages: Tensor, score: Tensor, batch: RolloutBatch) -> Tensor:
        """A' [B,T] of advantages [B,T] and their scores."""
        live = batch.response_mask & counted(batch.rewards)[:, None]
        out = advantages * (1 + self.score_coef * score)
        if self.additive_coef:
            groups = batch.groups
            tokens = groups.sum(live.sum(1).to(score.dtype))
            mean = groups.sum(masked(score, live).sum(1)) / tokens.clamp(min=1)
            out = out + self.additive_coef * (score - groups.spread(mean)[:, None])
        return masked(out, live)


def _white(x: Tensor, tokens: Tensor) -> Tensor:
    """`x` normalised over `tokens` [B,T] bool; 0 elsewhere and where there are fewer than two."""
    n = tokens.sum(dtype=torch.int32)
    x = masked(x, tokens)
    centred = masked(x - x.sum() / n.clamp(min=1), tokens)
    variance = centred.square().sum() / (n - 1).clamp(min=1)
    return centred / (variance + VARIANCE_EPS).sqrt()
