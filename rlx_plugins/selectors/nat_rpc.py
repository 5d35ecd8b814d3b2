"""NAT's random prefixes: only a random prefix of each response is forwarded and trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Columns, Selector
from ..core.params import param
from ..core.registry import register


@register("selector", "nat_rpc")
@dataclass
class NATPrefix(Selector):
    """A row of n model tokens is cut after L of them, L uniform on C..n, and a token weighs the inverse of the
    probability that it survives. Forward and backward pass get shorter; the expected gradient is that of the full rows.

        C = clamp(min_prefix, 1, n)      L = min(C + floor(u (n - C + 1)), n)
        weight_t = (n - C + 1) / (n - t + 1) for C < t <= L, 1 for t <= C, 0 beyond L        t counts model tokens

    Reads response_mask [B,T]; returns weight [B,T] and kept_length [B]: response positions up to the L-th model token,
    tool tokens in between included. The host cuts the rows to it. Denominators stay those of the full rows, old
    log-probs and advantages were made on them, and rules that need whole rows (sequence ratios) are refused.

    The largest weight is n - C + 1, on the last token: a long row's variance grows like n log n. `w_max` caps it at the
    price of a bias. The cut's distribution and the cap are reconstructions.
    """

    paper = "NAT: partial-token policy gradients, arXiv 2603.06619"
    capabilities = frozenset({"cut_rows"})
    cuts_rows = True

    min_prefix: int = param(1, ge=1, doc="C: model tokens that are always kept; a larger one bounds the weights")
    w_max: float | None = param(None, ge=1, doc="largest weight; None: no cap, unbiased")

    def __call__(self, batch: RolloutBatch) -> Columns:
        mask = batch.response_mask
        rank, cut = mask.cumsum(1), self.cut(batch)
        weight = self.inverse_survival(rank, batch.lengths)
        if self.w_max is not None:
            weight = weight.clamp(max=self.w_max)
        kept = mask & (rank <= cut[:, None])
        position = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        return {
            "weight": torch.where(kept, weight, torch.zeros_like(weight)).to(batch.dtype),
            "kept_length": torch.where(kept, position, torch.zeros_like(position)).amax(1),
        }

    def cut(self, batch: RolloutBatch) -> Tensor:
        """L [B] int64: model tokens kept of each row."""
        n, first = batch.lengths, self.first(batch.lengths)
        cuts = first + (batch.uniform("nat_rpc/cut") * (n - first + 1)).floor().long()
        return torch.minimum(cuts, n)

    def first(self, n: Tensor) -> Tensor:
        """C [B]: the shortest prefix of a row of n model tokens."""
        return torch.minimum(n, torch.full_like(n, self.min_prefix))

    def inverse_survival(self, rank: Tensor, n: Tensor) -> Tensor:
        """1 / P(L >= t) [B,T] of the t-th model token, float64."""
        n, first = n[:, None], self.first(n)[:, None]
        return (n - first + 1).double() / (n - torch.maximum(rank, first) + 1)
