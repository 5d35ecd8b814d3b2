"""`rlx diagnose`: the diagnosis of a run folder as tables, or as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..core.errors import ConfigError
from ..recipes.run_folder import RunFolder, read_json
from .measurements import Measurement, measure
from .rules import RULES, STAGES, Diagnosis, Rule, diagnose


@dataclass(frozen=True)
class Report:
    """A run's measurements and what the rules make of them."""

    folder: Path
    steps: int
    measured: dict[str, Measurement]
    diagnosis: Diagnosis

    @property
    def healthy(self) -> list[Rule]:
        """Rules that were measured and did not fire."""
        fired = {flag.rule.id for flag in self.diagnosis.flags}
        return [rule for rule in RULES if rule.id not in fired and rule.id not in self.diagnosis.unknown]

    def as_json(self) -> dict[str, Any]:
        """Plain values only."""
        measured = self.measured
        return {
            "run": str(self.folder),
            "steps": self.steps,
            "flags": [
                {
                    "id": f.rule.id,
                    "what": f.rule.what,
                    "stage": f.rule.stage,
                    "value": f.value,
                    "threshold": f.threshold,
                    "severity": f.severity,
                    "evidence": measured[f.rule.metric].evidence,
                    "kinds": list(f.rule.kinds),
                    "methods": list(f.rule.methods),
                }
                for f in self.diagnosis.flags
            ],
            "healthy": [
                {"id": r.id, "value": measured[r.metric].value, "evidence": measured[r.metric].evidence}
                for r in self.healthy
            ],
            "not_measured": [
                {"id": r.id, "reason": measured[r.metric].evidence} for r in RULES if r.id in self.diagnosis.unknown
            ],
            "try_kinds": [{"kind": kind, "stage": STAGES[kind]} for kind in self.diagnosis.try_kinds],
        }


def diagnose_run(folder: Path) -> Report:
    """Read a run's metrics and apply the rules; ConfigError where there is no run, or none with metrics."""
    files = RunFolder(folder)
    records = files.records()
    if not records:
        what = "it has no metrics yet" if files.recipe.exists() else f"no {files.metrics.name}"
        raise ConfigError(f"{folder}: not a run to diagnose: {what}")
    plugins = bool(read_json(files.recipe)["recipe"]["plugins"]) if files.recipe.exists() else True
    measured = measure(records, plugins=plugins)
    found = diagnose({name: m.value for name, m in measured.items()})
    return Report(folder, records[-1]["step"], measured, found)


def print_diagnosis(folder: Path, out: Console, *, as_json: bool) -> None:
    """Print the diagnosis of a run."""
    report = diagnose_run(folder)
    if as_json:
        print(json.dumps(report.as_json(), indent=2))
        return
    found = report.diagnosis
    out.print(f"{report.folder}, {report.steps} steps\n", markup=False, highlight=False)
    if found.flags:
        out.print(_flag_table(report))
        for flag in found.flags:
            out.print(f"\n{flag.rule.id}: {report.measured[flag.rule.metric].evidence}", markup=False, highlight=False)
            out.print(f"  kinds    {', '.join(flag.rule.kinds)}", markup=False, highlight=False)
            if flag.rule.methods:
                out.print(f"  methods  {', '.join(flag.rule.methods)}", markup=False, highlight=False)
        out.print(f"\ntry, best first: {', '.join(found.try_kinds)}", markup=False, highlight=False)
    else:
        out.print("nothing found among what was measured", highlight=False)
    table = Table("healthy", "value", "evidence", box=None, pad_edge=False)
    for rule in report.healthy:
        measured = report.measured[rule.metric]
        table.add_row(rule.id, f"{measured.value:.4g}", measured.evidence)
    out.print()
    out.print(table)
    if found.unknown:
        table = Table("not measured", "why", box=None, pad_edge=False)
        for rule in RULES:
            if rule.id in found.unknown:
                table.add_row(rule.id, report.measured[rule.metric].evidence)
        out.print()
        out.print(table)


def _flag_table(report: Report) -> Table:
    table = Table("pathology", "what", "value", "threshold", "severity", "stage", box=None, pad_edge=False)
    for f in report.diagnosis.flags:
        sign = ">=" if f.rule.above else "<="
        table.add_row(
            f.rule.id, f.rule.what, f"{f.value:.4g}", f"{sign} {f.threshold:g}", f"{f.severity:.2f}", f.rule.stage
        )
    return table
