"""ReSum as one name: partners with and without a summary, and rewards compared within each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..advantages.resum import ReSum as ReSumAdvantage
from ..allocation.resum import ReSum as ReSumAllocator
from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register
from ._parts import spec


@register("method", "resum")
@dataclass
class ReSum(Method):
    """Expands to allocator=resum and advantage=resum, which look for the same `phrase`.

    The parameters are those of the two parts, which check them; `rlx show allocator resum` and
    `rlx show advantage resum` say what each means.
    """

    paper = ReSumAllocator.paper

    phrase: tuple[int, ...] = param(doc="both; token ids that begin a summary")
    trees: int = param(ReSumAllocator.trees, doc="allocator")
    per_tree: int = param(ReSumAllocator.per_tree, doc="allocator")
    min_prefix: int = param(ReSumAllocator.min_prefix, doc="allocator; tokens")
    natural_bonus: float = param(ReSumAdvantage.natural_bonus, doc="advantage")
    artificial_bonus: float = param(ReSumAdvantage.artificial_bonus, doc="advantage")
    split: bool = param(ReSumAdvantage.split, doc="advantage")
    eps: float = param(ReSumAdvantage.eps, doc="advantage")

    def expand(self) -> dict[str, Any]:
        return {"allocator": spec(self, ReSumAllocator), "advantage": spec(self, ReSumAdvantage)}
