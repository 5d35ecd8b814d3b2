"""Apriel-Reasoner: the penalty of overlong answers, forgiven in part where the prompt is hard and the answer right."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.batch import RolloutBatch
from ..core.errors import ConfigError
from ..core.kinds import Columns, Reward
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, wide
from ..core.terms import masked
from ._correctness import correctness


@register("reward", "apriel")
@dataclass
class Apriel(Reward):
    """A soft penalty in the last stretch before the token limit. A correct answer pays it in proportion to a power of
    its group's success rate: nearly nothing on a hard prompt, all of it on an easy one.

        free = max_tokens - buffer_tokens;   penalty = (free - n) / buffer_tokens for free < n <= max_tokens, else 0
        scale = rate^rate_exponent for a success, failure_scale else; 1 for a row that was cut off at the limit
        reward = rewards + scale penalty

    Reads rewards [B] (NaN stays NaN), correct [B] where the batch has it, else rewards (success = above
    success_threshold), finished [B], group [B] and the lengths n in model tokens. Returns rewards, overlong_penalty (in
    [-1, 0]) and overlong_scale [B]. The rate is over the judged rows of the group. `buffer_tokens: 0` switches it off.

    rate_exponent 0 is DAPO's soft overlong punishment. The exponent's value is not in the released configuration, whose
    buffer is 0. Beyond max_tokens, where the engine's own limit is another, the penalty is 0 as in the release.
    """

    paper = "Apriel-Reasoner: RL Post-Training for General-Purpose and Efficient Reasoning, arXiv 2604.02007"
    provides = frozenset({"overlong_penalty", "overlong_scale"})
    scope = "group"

    max_tokens: int = param(16384, gt=0, doc="response limit in tokens; the paper's training budget")
    buffer_tokens: int = param(4096, ge=0, doc="tokens before the limit that cost; ours (the code's default: 0, off)")
    rate_exponent: float = param(1.0, ge=0, doc="gamma, of the success rate; 0: successes pay in full; reconstructed")
    failure_scale: float = param(1.0, ge=0, le=1, doc="what failures pay; the code's 1")
    success_threshold: float = param(0.5, doc="success = above it, in a batch without the column correct")

    def check(self) -> None:
        if self.buffer_tokens > self.max_tokens:
            raise ConfigError(
                f"reward apriel.buffer_tokens: must be <= max_tokens ({self.max_tokens}), got {self.buffer_tokens}"
            )

    def __call__(self, batch: RolloutBatch) -> Columns:
        rewards, correct = wide(batch.rewards), correctness(self, batch)
        if not self.buffer_tokens:
            zero = torch.zeros_like(rewards)
            return {"rewards": rewards, "overlong_penalty": zero, "overlong_scale": zero + 1}
        success = correct > self.success_threshold
        rate = batch.groups.spread(batch.groups.mean(success.to(correct.dtype), counted(correct)))
        n, free = batch.lengths, self.max_tokens - self.buffer_tokens
        penalty = masked((free - n).to(rewards.dtype) / self.buffer_tokens, (n > free) & (n <= self.max_tokens))
        scale = torch.where(success, rate**self.rate_exponent, torch.full_like(rate, self.failure_scale))
        cut_off = (n >= self.max_tokens) & ~batch.finished.bool()
        scale = torch.where(cut_off, torch.ones_like(scale), scale).to(rewards.dtype)
        return {"rewards": rewards + scale * penalty, "overlong_penalty": penalty, "overlong_scale": scale}
