"""What every rollout-side hook is told about the step it runs in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import randomness
from .trajectory import Group


def _no_columns(key: str) -> Mapping[str, Any]:
    return {}


@dataclass
class Context:
    """One step of the rollout program.

    step, total_steps   update steps: the current one (from 0) and the planned number
    groups, group_size  groups the update wants, rollouts a group gets unless an allocator says otherwise
    max_tokens          response length bound in tokens
    prompts             token ids of every prompt by its key (stable across epochs, resumes and workers)
    offered             prompt keys the host's own data loader offers for this step, used when no sampler is chosen
    columns             dataset columns of a prompt: solution, hint text, domain, prior ...
    version             weight updates the sampling policy has seen
    seed                the run's seed, behind `uniform`
    started             every group started in this step, in order, those already left included
    injected            values that replace `uniform` draws in tests, by (name, *keys)
    metrics             what parts report with `log`; the host's logger gets it as rlx/<name>
    """

    step: int
    total_steps: int
    groups: int
    group_size: int
    max_tokens: int
    prompts: Mapping[str, Sequence[int]]
    offered: Sequence[str] = ()
    columns: Callable[[str], Mapping[str, Any]] = _no_columns
    version: int = 0
    seed: int = 0
    started: list[Group] = field(default_factory=list)
    injected: dict[tuple[Any, ...], float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def progress(self) -> float:
        """Share of the run that is over, in [0, 1)."""
        return self.step / self.total_steps if self.total_steps > 0 else 0.0

    def uniform(self, name: str, *keys: object) -> float:
        """A reproducible float in [0, 1), independent of call order; `name` begins with the plug-in's own name."""
        drawn = (name, *keys)
        if drawn in self.injected:
            return self.injected[drawn]
        return randomness.uniform(self.seed, self.step, name, keys)

    def generator(self, name: str, *keys: object) -> torch.Generator:
        """A CPU generator seeded like `uniform`, for draws that need more than one number."""
        bits = randomness.hash_bits(self.seed, self.step, name, keys)
        return torch.Generator().manual_seed(bits & (2**63 - 1))

    def log(self, name: str, value: float) -> None:
        """Report a number under rlx/<name>; `name` begins with the kind: "sampler/rejected"."""
        self.metrics[name] = float(value)
