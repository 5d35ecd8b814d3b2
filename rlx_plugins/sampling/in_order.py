"""The prompts of the dataset, one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.context import Context
from ..core.kinds import Sampler
from ..core.params import param
from ..core.registry import register
from ..core.state import state


@register("sampler", "in_order")
@dataclass
class InOrder(Sampler):
    """Prompts in the order of the dataset, from the beginning again after the last one; the baseline of the samplers.
    TRL and verl draw them so where shuffling is off.

    The place in the dataset is state: a resumed run goes on with the next prompt.
    """

    capabilities = frozenset({"choose_prompts"})

    repeat: bool = param(True, doc="start again after the last prompt; False: the run ends with the dataset")
    taken: int = state(0)

    def draw(self, n: int, ctx: Context) -> list[str]:
        keys = list(ctx.prompts)
        if not keys or not self.repeat:
            n = min(n, len(keys) - self.taken)
        drawn = [keys[(self.taken + i) % len(keys)] for i in range(n)]
        self.taken += len(drawn)
        return drawn
