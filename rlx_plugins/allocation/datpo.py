"""DATPO: the harder a prompt looks, the more forks its rollouts get, at their most uncertain sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.context import Context
from ..core.errors import ConfigError
from ..core.kinds import Allocator
from ..core.operations import Forward, Steps
from ..core.params import param
from ..core.registry import register
from ..core.trajectory import Group, Rollout
from ._steps import first_own, from_model, starts_after_tokens

FORKED = "datpo_forked"
"""Entry of `group.extras`: the group has got its forks."""


@register("allocator", "datpo")
@dataclass
class DATPO(Allocator):
    """A few base rollouts estimate a prompt's value V; then every base rollout is forked at the beginnings of its most
    uncertain sentences, at the more of them and with the more branches the lower V is.

    V: mean reward of the base rollouts, scaled to [0, 1]; K = ceil(max_forks (1 - V)); B = ceil(max_branches (1 - V)).
    Of each base rollout the K sentences of the highest mean entropy (ties: the earlier) are resampled from their first
    token on, B times each, together with all that follows. A solved prompt (V = 1) gets no forks; a prompt without a
    scorable base rollout neither. At the defaults a prompt has 4 to 52 rollouts.

    A sentence ends with a token of `sentence_ends`, or with the rollout. Entropies (nats) are the policy's, from a
    forward pass. The paper splits text into sentences with PySBD. `advantage: datpo` and `aggregate: datpo` credit
    the tree (`method: datpo`). Reconstructed: ties.
    """

    paper = "Difficulty-Adaptive Sentence-entropy-guided Tree-structured Policy Optimization, arXiv 2609.08650"
    capabilities = frozenset({"rounds", "continue", "forward:entropy"})

    sentence_ends: tuple[int, ...] = param(doc="token ids that end a sentence")
    first_wave: int = param(4, ge=1, doc="base rollouts of a prompt, N; the paper's 4")
    max_forks: int = param(3, ge=0, doc="forked sentences of a rollout at V = 0, K_max; the paper's 3")
    max_branches: int = param(4, ge=0, doc="branches at a fork at V = 0, B_max; the paper's 4")
    reward_min: float = param(0.0, doc="reward that counts as 0 in V")
    reward_max: float = param(1.0, doc="reward that counts as 1 in V")

    def check(self) -> None:
        if not self.sentence_ends:
            raise ConfigError("allocator datpo.sentence_ends: expected at least one token id")
        if self.reward_min >= self.reward_max:
            raise ConfigError(
                f"allocator datpo.reward_min: must be below reward_max ({self.reward_max:g}), got {self.reward_min:g}"
            )

    def more(self, idle: list[Group], ctx: Context) -> Steps:
        new = [r for g in idle if not g.rollouts for r in g.start(self.first_wave)]
        started = {r.group for r in new}
        hard = [g for g in idle if g.id not in started and FORKED not in g.extras and self.spread(g)[0] > 0]
        base = [(g, r) for g in hard for r in g.done()]
        entropies = (yield Forward([r for _, r in base], "entropy")) if base else []
        for g in hard:
            g.extras[FORKED] = True
        for (g, r), entropy in zip(base, entropies, strict=True):
            k, branches = self.spread(g)
            for at in self.forks(r, entropy, k):
                new += g.fork(r, at, branches)
        forks = sum(r.forked is not None for r in new)
        ctx.log("allocator/datpo_forks", ctx.metrics.get("allocator/datpo_forks", 0.0) + forks)
        return new

    def value(self, group: Group) -> float | None:
        """V; None where no base rollout could be scored."""
        rewards = [r.reward for r in group.rollouts if r.wave == 0 and r.scorable and r.reward is not None]
        if not rewards:
            return None
        mean = (sum(rewards) / len(rewards) - self.reward_min) / (self.reward_max - self.reward_min)
        return min(max(mean, 0.0), 1.0)

    def spread(self, group: Group) -> tuple[int, int]:
        """(K, B): forks of each base rollout, and branches at each."""
        value = self.value(group)
        if value is None:
            return 0, 0
        hard = 1 - value
        return math.ceil(self.max_forks * hard - 1e-9), math.ceil(self.max_branches * hard - 1e-9)

    def forks(self, r: Rollout, entropy: Sequence[float], k: int) -> list[int]:
        """Positions of the first tokens of the `k` sentences of the highest mean entropy, ascending."""
        starts, own = self.starts(r), from_model(r)
        scores = []
        for a, b in zip(starts, [*starts[1:], len(own)]):
            inside = [entropy[i] for i in range(a, b) if own[i]]
            scores.append(sum(inside) / len(inside))
        ranked = sorted(range(len(starts)), key=lambda i: -scores[i])
        return sorted(starts[i] for i in ranked[:k])

    def starts(self, r: Rollout) -> list[int]:
        """Positions at which the model's sentences begin."""
        first = first_own(r)
        return [] if first is None else sorted({first, *starts_after_tokens(r, self.sentence_ends)})
