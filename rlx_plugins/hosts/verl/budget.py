"""Token budgets: a run ends after the step in which it has sampled, or trained, a number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...recipes.run_folder import read_json, write_json
from ...recipes.settings import BUDGETS

FILE = "rlx_tokens.json"


@dataclass
class TokenBudget:
    """`rlx.max_generated_tokens` and `rlx.max_update_tokens` of a run, and what it has spent.

    limits  kind -> tokens; empty: no budget, nothing is written
    """

    limits: dict[str, int]
    spent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BUDGETS, 0))

    @classmethod
    def of(cls, rlx: Mapping[str, Any], *, plugins: bool) -> TokenBudget:
        """The budget in the group `rlx` of the configuration, for a run with or without plug-ins; ConfigError for one
        that can't be kept."""
        given = {kind: rlx[f"max_{kind}_tokens"] for kind in BUDGETS}
        for kind, tokens in given.items():
            if tokens is not None and (not isinstance(tokens, int) or tokens < 1):
                raise ConfigError(f"rlx.max_{kind}_tokens: a number of tokens, got {tokens!r}")
            if tokens is not None and not plugins:
                raise ConfigError(
                    f"rlx.max_{kind}_tokens: tokens are counted in runs with plug-ins; name one (advantage=grpo), or"
                    " set trainer.total_training_steps"
                )
        return cls({kind: tokens for kind, tokens in given.items() if tokens is not None})

    def count(self, **tokens: float) -> None:
        """Add the tokens of a step."""
        for kind, number in tokens.items():
            self.spent[kind] += round(number)

    @property
    def is_spent(self) -> bool:
        return any(self.spent[kind] >= tokens for kind, tokens in self.limits.items())

    def save(self, folder: str | Path) -> None:
        """Write what has been spent to the folder of a checkpoint."""
        if self.limits:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_json(Path(folder) / FILE, self.spent)

    def load(self, folder: str | Path) -> None:
        """Go on from what a checkpoint's run had spent; refuses one that did not count."""
        if not self.limits:
            return
        path = Path(folder) / FILE
        if not path.exists():
            raise ConfigError(f"{folder} has no {FILE}: its run had no token budget, so what it spent is not known")
        self.spent = read_json(path)
