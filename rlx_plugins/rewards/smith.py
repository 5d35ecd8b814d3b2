"""SMITH: five axes of reward for building tools and using them, each normalised apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core.batch import RolloutBatch
from ..core.errors import DataError
from ..core.kinds import Columns, Reward
from ..core.params import param
from ..core.registry import register

AXES = ("build_format", "build_env", "build_judge", "use_correct", "use_env")
NAN = math.nan


@register("reward", "smith")
@dataclass
class SMITH(Reward):
    """A prompt asks the policy to write a tool, or to answer with one from the pool. Failures of schema, of outcome and
    of quality are scored on axes of their own, and the axes of the other role do not apply (NaN), so that an axis that
    is mostly constant hides no other: an advantage of several components normalises each inside its group.

        build_format = 0.5 (blocks_ok + names_ok + params_ok), 0 if fatal;  fatal: schema_bad, or (strict) any not ok
        build_env = build_format + share of held-out questions answered right with a successful call, 0 if fatal
        build_judge = mean of the judge's scores clipped to [0, 5] / 5; align syntax: -0.5, missing: 0, mismatch: half
        use_correct = 2 correct eff,   rho = min(max(turns, 0) / max_turns, 1),
                      eff = 1 - 0.6 rho for rho <= 1/2, else 0.7 (1 - (2 rho - 1)^2)
        use_env = min(calls_ok / max(want_calls, 1), 1) - 0.5 [no final answer]

    Reads smith_facts, a list of one dict per row: role "build" with blocks_ok, names_ok, params_ok, schema_bad,
    questions [[correct, calls], ...], judge (scores 0-5, or None), align "ok" | "mismatch" | "missing" | "syntax"; any
    other role with correct, turns, calls_ok, final_answer. None in place of a dict: no axis. Returns reward_components
    [B,5] and component_names; `method: smith` weighs them (0.2 for the judge) and sums as TRL's normalise-then-sum.

    Format enters twice, as in the code. All but the judge's weight and the sum itself are the released code's;
    `want_calls` is reconstructed.
    """

    paper = "SMITH: Schema-grounded Multi-task Iterative Tool Honing, arXiv 2608.24571"
    requires = frozenset({"smith_facts"})
    provides = frozenset({"reward_components", "component_names"})
    shapes = frozenset({"reward_components"})

    max_turns: int = param(5, ge=1, doc="turns at which a use is worth nothing; the code's 5")
    strict: bool = param(True, doc="one missing block, name or parameter makes the build worth nothing; the code's")
    want_calls: int = param(1, ge=0, doc="successful calls a use should make; reconstructed")

    def __call__(self, batch: RolloutBatch) -> Columns:
        rows = [self.axes(facts) for facts in batch.smith_facts]
        components = torch.tensor(rows, dtype=batch.dtype, device=batch.device).reshape(-1, len(AXES))
        return {"reward_components": components, "component_names": AXES}

    def axes(self, facts: Mapping[str, Any] | None) -> tuple[float, ...]:
        """The five axes of one row, NaN where one does not apply."""
        if facts is None:
            return (NAN,) * len(AXES)
        if facts.get("role") == "build":
            return (*self._build(facts), NAN, NAN)
        return (NAN, NAN, NAN, *self._use(facts))

    def _build(self, facts: Mapping[str, Any]) -> tuple[float, float, float]:
        checks = [bool(facts[name]) for name in ("blocks_ok", "names_ok", "params_ok")]
        judged = _judged(facts.get("judge"), facts.get("align", "ok"))
        if facts["schema_bad"] or (self.strict and not all(checks)):
            return 0.0, 0.0, judged
        form = 0.5 * sum(checks)
        questions = facts["questions"]
        solved = sum(bool(correct) and calls >= 1 for correct, calls in questions)
        return form, form + (solved / len(questions) if questions else 0.0), judged

    def _use(self, facts: Mapping[str, Any]) -> tuple[float, float]:
        rho = min(max(facts["turns"], 0) / self.max_turns, 1.0)
        efficiency = 1 - 0.6 * rho if rho <= 0.5 else 0.7 * (1 - (2 * rho - 1) ** 2)
        called = min(facts["calls_ok"] / max(self.want_calls, 1), 1.0)
        return 2 * float(facts["correct"]) * efficiency, called - 0.5 * (not facts["final_answer"])


def _judged(scores: Any, align: str) -> float:
    if scores is None or not len(scores):
        return NAN
    quality = sum(min(max(float(x), 0.0), 5.0) for x in scores) / len(scores) / 5
    outcomes = {"ok": quality, "mismatch": 0.5 * quality, "missing": 0.0, "syntax": -0.5}
    if align not in outcomes:
        raise DataError(f"smith_facts: align is one of {', '.join(outcomes)}; got {align!r}")
    return outcomes[align]
