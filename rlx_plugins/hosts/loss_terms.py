"""Loss terms by name: which column counts each, and which of them a micro-batch normalises by itself."""

from __future__ import annotations

from ..core.config import Parts
from ..core.objective import DISTILL, POLICY

ENTROPY = "entropy"
"""Name of the entropy bonus among the totals; its count is the number of model tokens."""


def micro_terms(parts: Parts) -> frozenset[str]:
    """Loss terms whose aggregate normalises by the micro-batch it sees."""
    rules = {POLICY: parts.one("aggregate")}
    if parts["distill"]:
        rules[DISTILL] = parts.one("distill_aggregate") or parts.one("aggregate")
    return frozenset(name for name, rule in rules.items() if rule.scope == "micro")


def count_columns(parts: Parts) -> dict[str, str]:
    """Loss term -> the column of its count."""
    columns = {POLICY: "loss_count"}
    if parts["distill"]:
        columns[DISTILL] = "distill_count"
    return columns | {part.name: f"{part.name}_count" for part in parts["auxiliary"]}
