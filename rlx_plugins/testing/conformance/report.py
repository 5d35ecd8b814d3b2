"""What the suite found: checks passed, skipped with the reason, exempted with the reason, failed with what to do."""

from __future__ import annotations

from dataclasses import dataclass, field


class Skipped(Exception):
    """The check makes no sense here; the argument says why."""


class Failed(Exception):
    """The check found what it looks for."""

    def __init__(self, expected: str, seen: str, hint: str):
        super().__init__(f"expected {expected}; seen {seen}; hint: {hint}")
        self.expected, self.seen, self.hint = expected, seen, hint


@dataclass
class Report:
    """The outcome of every check by its name; `str` of it is a table.

    passed   check -> a remark, often empty
    skipped, exempt   check -> the reason
    failed   check -> what was expected, what was seen, how to mend it
    """

    plugin: str
    passed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    exempt: dict[str, str] = field(default_factory=dict)
    failed: dict[str, Failed] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [(check, "passed", remark) for check, remark in self.passed.items()]
        rows += [(check, "skipped", reason) for check, reason in self.skipped.items()]
        rows += [(check, "exempt", reason) for check, reason in self.exempt.items()]
        rows += [(check, "FAILED", failure.seen) for check, failure in self.failed.items()]
        lines = [f"  {check:<18} {outcome:<8} {remark}".rstrip() for check, outcome, remark in rows]
        return "\n".join([self.plugin, *lines])


class ConformanceError(AssertionError):
    """A plug-in that fails checks; `report` holds all outcomes."""

    def __init__(self, report: Report):
        total = len(report.passed) + len(report.failed)
        lines = [f"{report.plugin} fails {len(report.failed)} of {total} checks"]
        for check, failure in report.failed.items():
            lines += [
                f"  {check}",
                f"    expected  {failure.expected}",
                f"    seen      {failure.seen}",
                f"    hint      {failure.hint}",
            ]
        super().__init__("\n".join(lines))
        self.report = report
