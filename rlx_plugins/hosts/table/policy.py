"""The policy of the simulated host: one table of next-token logits per prompt and previous token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

BAD, GOOD, EOS, CALL = range(4)
"""The vocabulary: a wrong step, a right step, the end, and a call of the simulated tool."""
VOCABULARY = 4
TOOL, START = 4, 5
"""What may stand before a token and is never sampled: tool output, and the prompt (or any other foreign token)."""


class TablePolicy(nn.Module):
    """Next-token logits by prompt and previous token, theta [P, 6, 4] (float64).

    Tokens in the context (a hint the training prompt does not have) raise the logit of GOOD by `boost` nats.
    """

    def __init__(self, prompts: int, *, seed: int = 0, boost: float = 1.5):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        theta = 0.5 * torch.randn(prompts, START + 1, VOCABULARY, generator=generator, dtype=torch.float64)
        difficulty = torch.randn(prompts, generator=generator, dtype=torch.float64)
        theta[:, :, GOOD] -= difficulty[:, None] + 0.3
        theta[:, :, EOS] -= 1.0
        theta[:, :, CALL] -= 2.5
        self.theta = nn.Parameter(theta)
        self.boost = boost

    def forward(self, prompt: Tensor, previous: Tensor, helped: Tensor, theta: Tensor | None = None) -> Tensor:
        """Logits [..., V] after `previous` [...] (token ids) for prompts [...]; `helped` [...] bool.

        `theta`: other weights than the policy's own (the engine's copy, an averaged policy).
        """
        theta = self.theta if theta is None else theta
        logits = theta[prompt, previous.clamp(0, START)]
        shift = torch.zeros(VOCABULARY, dtype=theta.dtype)
        shift[GOOD] = self.boost
        return logits + helped[..., None].to(theta.dtype) * shift


def previous_tokens(response_ids: Tensor) -> Tensor:
    """[B,T] the token before each response token; START before the first."""
    first = torch.full_like(response_ids[:, :1], START)
    return torch.cat([first, response_ids[:, :-1]], 1)


def token_logp(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities [...] of `ids` [...] under logits [..., V]; NaN for tokens outside the vocabulary."""
    inside = ids < VOCABULARY
    logp = logits.log_softmax(-1).gather(-1, torch.where(inside, ids, 0)[..., None])[..., 0]
    return torch.where(inside, logp, torch.nan)


def entropy(logits: Tensor) -> Tensor:
    """Entropy [...] in nats of logits [..., V]."""
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def score(tokens: Sequence[int], ended: bool) -> tuple[float, dict[str, float]]:
    """Reward and its components of one response: verifiable, and visible to the reader at a glance.

    correct: at least half of the steps (GOOD or BAD) are GOOD; brief: exp(-length / 8); ended: it stopped by itself.
    The reward is `correct`.
    """
    steps = [t for t in tokens if t in (BAD, GOOD)]
    correct = float(bool(steps) and sum(t == GOOD for t in steps) * 2 >= len(steps))
    brief = math.exp(-len(tokens) / 8)
    return correct, {"correct": correct, "brief": brief, "ended": float(ended)}
