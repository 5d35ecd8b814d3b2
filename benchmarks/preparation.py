"""The batch phase with every reward, correction, aggregate and selector against the batch phase of plain GRPO.

    python benchmarks/preparation.py [--rows 1024] [--tokens 2048]

All get the same scored batch; what is timed is the whole batch phase: checks, rewards, advantages, weights, counts and
metrics. A part that works with one advantage only brings it along.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from _batch import build, config, scored_batch, sizes
from _measure import against, machine, table

import rlx_plugins as rlx
from rlx_plugins.core.registry import builtin_names

KINDS = ("reward", "correction", "aggregate", "selector")

REASONS = {
    "correction tis": "ratios of two columns of log-probabilities; plain GRPO reads none",
    "correction mis": "ratios of two columns of log-probabilities; plain GRPO reads none",
    "correction ais": "ratios of two columns of log-probabilities, and three statistics of them",
    "correction ppo_ewma": "ratios of three columns of log-probabilities",
    "selector nat_rpc": "the place of every token among its row's, and its weight in float64",
    "selector nat_urs": "a reproducible random number for every token",
    "selector adhint": "mean entropy of every row, and the distance of every token from it",
    "selector bandit_sched": "means of three columns over the tokens of every row; a network over the rows",
    "selector dart": "finds the turns of every row; mean entropy of each, quantiles by group, ratios of every token",
    "selector divopd": "finds the turns of every row; sums over the tokens of each, ranks them",
    "aggregate datpo": "brings its advantage along, the credit on a tree",
    "reward meds": "clusters the remembered mistakes of every prompt anew, in Python",
}


class Preparation:
    """One run of the batch phase on a fresh copy of the batch, with the parts in the state of the second step."""

    def __init__(self, chosen: Mapping[str, Any], batch: rlx.RolloutBatch):
        self.parts, self.columns = build(chosen, batch), dict(batch)
        self.run = {"step": batch.step, "total_steps": batch.total_steps, "seed": batch.seed}
        self()
        self.state = self.parts.state_dict()

    def restore(self) -> None:
        self.parts.load_state_dict(self.state)

    def __call__(self) -> None:
        rlx.prepare(self.parts, rlx.RolloutBatch(self.columns, **self.run))


def preparations(batch: rlx.RolloutBatch) -> dict[str, Preparation]:
    """Every built-in part of `KINDS`, by kind and name."""
    return {
        f"{kind} {name}": Preparation(config(kind, name), batch)
        for kind in KINDS
        for name in sorted(builtin_names(kind))
    }


def main() -> None:
    given = sizes(rows=1024, tokens=2048)
    print(f"{machine()}\n")
    batch = scored_batch(given.rows, given.tokens)
    plain = Preparation({"advantage": "grpo"}, batch)
    timed = against(plain, {"plain GRPO": plain} | preparations(batch))
    title = f"batch phase of {batch.size:,} rollouts of up to {given.tokens:,} tokens"
    print(table(title, "plain GRPO", timed, reasons=REASONS))


if __name__ == "__main__":
    main()
