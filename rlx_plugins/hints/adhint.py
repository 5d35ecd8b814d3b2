"""ADHint: the beginning of the solution before further rollouts, the longer the harder the prompt has proved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

from ..core.context import Context
from ..core.errors import ConfigError
from ..core.kinds import Hint
from ..core.params import param
from ..core.registry import register
from ..core.trajectory import Group, Rollout, Segment
from ._columns import column_tokens

HINTED = "hinted"
"""Tag of a rollout that begins with a hint; it is the row's `source` in the batch."""


@register("hint", "adhint")
@dataclass
class ADHint(Hint):
    """A prompt is first sampled without help. The harder that shows it to be, the more of its solution stands at the
    start of its further rollouts.

        d = 1 - mean clip(r / max_reward, 0, 1) over the plain rollouts with a finite reward, 1 without any
        share = clip((max_share - min_share) d + min_share + noise, min_share, max_share)
        hint = the first clip(floor(share L + 0.5), 1, L - 1) of the solution's L tokens

    The noise is uniform in [-noise_width, noise_width], one draw per group. L is at most max_tokens - min_continuation.
    There is no hint where d <= skip_difficulty or L < 2; such a prompt trains its plain rollouts alone.

    `hinted_rollouts` of the group_size are hinted, the others plain; beside an allocator they come on top of its own.
    Both sets are one group, told apart by `helped`. Hint tokens are in `hint_mask` and in response_mask: they are
    trained like the model's own, as far as `selector: adhint` lets them (`method: adhint`). The mean is weighted by
    1/propensity where a pruner chose among the plain rollouts.

    The linear rule with noise is the paper's; its bounds, the rounding, the rule for no hint, and the division of the
    group are reconstructed.
    """

    paper = "ADHint: Adaptive Hints with Difficulty Priors for Reinforcement Learning, arXiv 2512.13095"
    capabilities = frozenset({"continue", "rounds"})

    column: str = param("solution", doc="dataset column of the reference solution")
    hinted_rollouts: int | None = param(None, ge=1, doc="of a prompt's group_size; None: half of it; reconstructed")
    min_share: float = param(0.1, ge=0, lt=1, doc="share of the solution at difficulty 0; reconstructed")
    max_share: float = param(0.9, ge=0, lt=1, doc="share of the solution at difficulty 1; reconstructed")
    noise_width: float = param(0.05, ge=0, doc="bound of the noise on the share; reconstructed")
    skip_difficulty: float = param(0.0, ge=0, lt=1, doc="no hint at this difficulty or below; reconstructed")
    max_reward: float = param(1.0, gt=0, doc="reward of a full success")
    min_continuation: int = param(1, ge=1, doc="response tokens that no solution may reach into; ours")

    def check(self) -> None:
        if self.min_share > self.max_share:
            raise ConfigError(
                f"hint adhint.min_share: must be at most max_share={self.max_share}, got {self.min_share}"
            )

    @property
    def token_columns(self) -> frozenset[str]:
        """Dataset columns the host gives as token ids."""
        return frozenset({self.column})

    def reserve(self, ctx: Context) -> int:
        return max(1, ctx.group_size // 2) if self.hinted_rollouts is None else self.hinted_rollouts

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        tried = [g for g in idle if g.rollouts and not any(r.tag == HINTED for r in g.rollouts)]
        new = [r for g in tried if self.hint_length(g, ctx) for r in g.start(self.reserve(ctx))]
        for r in new:
            r.tag = HINTED
        return new

    def prepare(self, new: list[Rollout], groups: dict[str, Group], ctx: Context) -> None:
        starting = [r for r in new if r.tag == HINTED and not r.segments]
        lengths = {id_: self.hint_length(groups[id_], ctx) for id_ in {r.group for r in starting}}
        for r in starting:
            hint = column_tokens(self, groups[r.group], self.column)[: lengths[r.group]]
            r.segments.append(Segment(hint, "hint", imitated=True))

    def observe(self, groups: list[Group], ctx: Context) -> None:
        if groups:
            ctx.log("hint/adhint_difficulty", fmean(map(self.difficulty, groups)))
            ctx.log("hint/adhint_hinted", fmean(any(r.tag == HINTED for r in g.rollouts) for g in groups))

    def difficulty(self, group: Group) -> float:
        """1 - the mean share of a full success over the plain rollouts; 1 where none has a finite reward."""
        plain = [r for r in group.done() if not r.helped and r.reward is not None and math.isfinite(r.reward)]
        if not plain:
            return 1.0
        shares = [min(max(r.reward / self.max_reward, 0.0), 1.0) / r.propensity for r in plain]
        return 1 - sum(shares) / sum(1 / r.propensity for r in plain)

    def share(self, difficulty: float, noise: float) -> float:
        """Share of the solution that a prompt of this difficulty is shown."""
        share = (self.max_share - self.min_share) * difficulty + self.min_share + noise
        return min(max(share, self.min_share), self.max_share)

    def noise(self, group: Group, ctx: Context) -> float:
        """The group's draw, uniform in [-noise_width, noise_width]."""
        return self.noise_width * (2 * ctx.uniform("adhint/noise", group.id) - 1)

    def hint_length(self, group: Group, ctx: Context) -> int:
        """Solution tokens shown to the group's hinted rollouts; 0: no hint."""
        length = min(len(column_tokens(self, group, self.column)), group.max_tokens - self.min_continuation)
        difficulty = self.difficulty(group)
        if difficulty <= self.skip_difficulty or length < 2:
            return 0
        wanted = math.floor(self.share(difficulty, self.noise(group, ctx)) * length + 0.5)
        return min(max(wanted, 1), length - 1)
