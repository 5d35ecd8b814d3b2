"""From a run's metrics to what the rules look at. What the metrics don't carry is not measured, and not guessed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Records = Sequence[Mapping[str, Any]]

MAX_WINDOW = 10
"""A value is the mean over the last tenth of the records, at most this many; "start" is the first tenth."""


@dataclass(frozen=True)
class Measurement:
    """A metric of the rules: its value and where it comes from; value None with the reason in `evidence`."""

    value: float | None
    evidence: str


def measure(records: Records, *, plugins: bool) -> dict[str, Measurement]:
    """All metrics of the rules by name.

    records  of one run, in order of steps
    plugins  whether the run has plug-ins: the host's own clip statistics do not describe theirs
    """
    run = _Run(records)
    clip = ["rlx/clip/clipped"] if plugins else ["clip_ratio/region_mean", "actor/pg_clipfrac"]
    return {
        "frac_all_fail": run.now("rlx/groups/all_fail"),
        "frac_all_pass": run.now("rlx/groups/all_pass"),
        "entropy_ratio": run.now_over_start("entropy", "actor/entropy"),
        "distinct_ratio": run.now("rlx/groups/distinct"),
        "length_ratio": run.now_over_start("completion_length"),
        "frac_truncated": run.now("completions/clipped_ratio", "response_length/clip_ratio"),
        "audit_corr": Measurement(None, "needs a second, independent score of the same responses; runs have none"),
        "effective_token_frac": run.now("rlx/tokens/effective"),
        "rollout_train_kl": run.now("rlx/sampling/kl", "rollout_corr/kl"),
        "staleness_mean": run.now("rlx/staleness/mean"),
        "clip_frac": run.now(*clip),
        "rollout_time_frac": run.share_of_time(),
        "len_p99_over_p50": run.now("rlx/length/p99_over_p50"),
        "domain_ratio_max": run.domain_ratio(),
        "reuse_mean": run.now("rlx/tokens/uses"),
    }


class _Run:
    def __init__(self, records: Records):
        self.records = records
        n = min(MAX_WINDOW, max(1, len(records) // 10))
        self.first, self.last = records[:n], records[-n:]

    def _mean(self, name: str, part: Records) -> float | None:
        values = [r[name] for r in part if _is_number(r.get(name))]
        return math.fsum(values) / len(values) if values else None

    def _where(self, part: Records) -> str:
        a, b = part[0]["step"], part[-1]["step"]
        return f"step {a}" if a == b else f"steps {a}-{b}"

    def _known(self, names: Sequence[str]) -> str | None:
        return next((n for n in names if any(_is_number(r.get(n)) for r in self.records)), None)

    def now(self, *names: str) -> Measurement:
        """Mean over the last records of the first of these metrics that the run has."""
        name = self._known(names)
        value = self._mean(name, self.last) if name else None
        if name is None or value is None:
            return _absent(names)
        return Measurement(value, f"{name} {value:.4g}, {self._where(self.last)}")

    def now_over_start(self, *names: str) -> Measurement:
        name = self._known(names)
        if name is None:
            return _absent(names)
        if len(self.records) < 2:
            return Measurement(None, "one record has no start to compare with")
        start, now = self._mean(name, self.first), self._mean(name, self.last)
        if start is None or now is None or start <= 0:
            return Measurement(None, f"{name} is not above 0 at the start")
        text = f"{name} {start:.4g} ({self._where(self.first)}) -> {now:.4g} ({self._where(self.last)})"
        return Measurement(now / start, text)

    def share_of_time(self) -> Measurement:
        """Time spent generating over all time: of the last records, or the whole run where it counts up."""
        if self._known(["rollout_seconds"]) and self._known(["seconds"]):
            end, begin = self.records[-1], self.records[0] if len(self.records) > 1 else {}
            spent = end["seconds"] - begin.get("seconds", 0)
            if spent > 0:
                value = (end["rollout_seconds"] - begin.get("rollout_seconds", 0)) / spent
                return Measurement(value, f"rollout_seconds over seconds, {self._where(self.records)}")
        parts = [self._mean(f"timing_s/{name}", self.last) for name in ("gen", "step")]
        if parts[0] is not None and parts[1]:
            text = f"timing_s/gen {parts[0]:.4g} of timing_s/step {parts[1]:.4g}, {self._where(self.last)}"
            return Measurement(parts[0] / parts[1], text)
        return _absent(["rollout_seconds", "timing_s/gen"])

    def domain_ratio(self) -> Measurement:
        """The largest share of a domain among the last batches over its share of the data."""
        prefix = "rlx/domain_target/"
        names = [key.removeprefix(prefix) for key in self.records[-1] if key.startswith(prefix)] if self.records else []
        ratios = {}
        for name in names:
            share = self._mean(f"rlx/domain_share/{name}", self.last)
            target = self._mean(f"{prefix}{name}", self.last)
            if share is not None and target:
                ratios[name] = (share / target, share, target)
        if not ratios:
            return Measurement(None, "the training data has no `domain` column, or the host does not record its shares")
        worst = max(ratios, key=lambda name: ratios[name])
        ratio, share, target = ratios[worst]
        return Measurement(
            ratio, f"{worst}: {share:.3g} of the rows, {target:.3g} of the data, {self._where(self.last)}"
        )


def _absent(names: Sequence[str]) -> Measurement:
    return Measurement(None, f"the run's metrics have no {' or '.join(names)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
