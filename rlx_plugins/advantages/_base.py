"""Advantages that change those of another estimator."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ..core.config import specs
from ..core.errors import ConfigError
from ..core.kinds import Advantage
from ..core.registry import create, implements

Base = str | dict[str, Any]
"""Another estimator: its name, or {"name": ..., parameter: value}."""


class OnBase(Advantage):
    """An advantage on top of the estimator its parameter `base` names.

    What the estimator reads, makes and remembers counts as this part's own; `reads` and `makes` are what it adds.
    Estimators that act during the rollout or inside the loss can't be a base.
    """

    base: Base | None
    reads: Any = frozenset()
    makes: Any = frozenset()

    @functools.cached_property
    def estimator(self) -> Any:
        """The plug-in behind `base`; None where it names none."""
        if self.base is None:
            return None
        label = f"advantage {self.name}.base"
        [spec] = specs(label, self.base)
        part = create("advantage", spec.pop("name"), **spec)
        hooks = [hook for hook in ("annotate", "in_loss") if implements(part, hook)]
        if hooks:
            raise ConfigError(f"{label}: {part.name} can't be a base, it has the hook {hooks[0]}; put it outermost")
        return part

    def check(self) -> None:
        _ = self.estimator

    @property
    def requires(self) -> frozenset[str]:
        return frozenset(self.reads) | frozenset(self.estimator.requires if self.estimator else ())

    @property
    def provides(self) -> frozenset[str]:
        return frozenset(self.makes) | frozenset(self.estimator.provides if self.estimator else ())

    @property
    def credits(self) -> str:  # type: ignore[override]
        return self.estimator.credits if self.estimator else "rewards"

    @property
    def fixes(self) -> Mapping[str, str | None]:  # type: ignore[override]
        return self.estimator.fixes if self.estimator else {}

    def state_dict(self) -> dict[str, Any]:
        own = super().state_dict()
        return {**own, "base": self.estimator.state_dict()} if self.estimator else own

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        if self.estimator is not None:
            if "base" not in saved:
                raise ConfigError(f"advantage {self.name}: the checkpoint has no state of its base {self.base}")
            self.estimator.load_state_dict(saved["base"])
            saved = {name: value for name, value in saved.items() if name != "base"}
        super().load_state_dict(saved)
