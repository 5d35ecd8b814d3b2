"""ADHint: hint tokens weigh what they resemble the policy's own, and nothing in rows that are pushed down."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.batch import RolloutBatch
from ..core.kinds import Columns, Selector
from ..core.params import param
from ..core.registry import register
from ..core.segments import wide
from ..core.terms import masked, masked_mean


@register("selector", "adhint")
@dataclass
class ADHint(Selector):
    """Learning from hint tokens at full weight imitates a foreign style, and pushing them down destroys correct text.
    So hint tokens whose entropy differs from that of the row's own continuation get small weights, and none where the
    advantage is negative.

    With mu the mean entropy of the row's generated tokens, a hint token t gets
    w_t = exp(-|H_t - mu| / (tolerance (mu + eps))), 0 where the row generated nothing or the advantage is negative.
    Generated tokens keep weight 1.

    Reads hint_mask, response_mask, entropy (nats, of the step's start) and advantages [B,T]; returns weight [B,T] and
    the numbers hint_tokens and hint_weight (their mean weight). Denominators stay those of all tokens.

    Only hint tokens inside response_mask are trained, and so concern this rule: those of segments with `imitated=True`
    (`hint: adhint`; `hint.imitate=true` for adaprefix). Others leave all weights at 1 and hint_tokens at 0. The weight
    function is reconstructed.
    """

    paper = "ADHint: Adaptive Hints with Difficulty Priors for Reinforcement Learning, arXiv 2512.13095"
    requires = frozenset({"hint_mask", "entropy"})

    tolerance: float = param(1.0, gt=0, doc="relative difference of entropy that costs a factor e; reconstructed")
    eps: float = param(1e-8, gt=0, doc="added to the mean entropy; reconstructed")
    modulate: bool = param(True, doc="weigh hint tokens by their entropy; paper")
    preserve: bool = param(True, doc="drop hint tokens where the advantage is negative; paper")

    def __call__(self, batch: RolloutBatch) -> Columns:
        mask, entropy = batch.response_mask, wide(batch.entropy)
        hint = mask & batch.hint_mask.bool()
        own = mask & ~hint
        weight = torch.ones_like(entropy)
        if self.modulate:
            mean = masked_mean(entropy, own, dim=1)[:, None]
            alike = torch.exp(-masked(entropy - mean, hint).abs() / (self.tolerance * (mean + self.eps)))
            weight = masked(alike, own.any(1, keepdim=True))
        if self.preserve:
            weight = masked(weight, batch.advantages >= 0)
        weight = torch.where(hint, weight, own.to(weight.dtype))
        return {
            "weight": weight.to(batch.dtype),
            "hint_tokens": hint.sum(),
            "hint_weight": masked_mean(weight, hint),
        }
