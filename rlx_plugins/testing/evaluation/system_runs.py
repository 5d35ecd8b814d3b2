"""Function forms of what is computed from whole runs: the comparison of matched seeds, and the diagnosis of metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...core.errors import ConfigError, close_matches


def compare_protocol(op: str, **arguments: Any) -> dict[str, Any]:
    """aggregate(bench, domains), paired(control, treatment, level, family, precision) or spearman(a, b)."""
    from ...comparison.statistics import domain_balanced, paired, spearman

    if op == "aggregate":
        balanced = domain_balanced(**arguments)
        return dataclasses.asdict(balanced) | {"missing": list(balanced.missing)}
    if op == "paired":
        found = paired(**arguments)
        return dataclasses.asdict(found) | {"dropped": list(found.dropped)}
    if op == "spearman":
        return {"rho": spearman(**arguments)}
    raise _unknown(op, ("aggregate", "paired", "spearman"))


def gfcr(op: str, **arguments: Any) -> dict[str, Any]:
    """stage(kinds) or diagnose(metrics, thresholds)."""
    from ...diagnosis.rules import diagnose, stages

    if op == "stage":
        return {"stage": stages(**arguments)}
    if op == "diagnose":
        found = diagnose(**arguments)
        flags = [
            {"id": f.rule.id, "stage": f.rule.stage, "kinds": list(f.rule.kinds), "severity": f.severity}
            for f in found.flags
        ]
        return {"flags": flags, "unknown": list(found.unknown), "try_kinds": list(found.try_kinds)}
    raise _unknown(op, ("stage", "diagnose"))


def _unknown(op: str, known: tuple[str, ...]) -> ConfigError:
    return ConfigError(f"unknown op {op!r}{close_matches(op, known)} (accepted: {', '.join(known)})")


FORMS: Mapping[str, Any] = {"compare_protocol": compare_protocol, "gfcr": gfcr}
