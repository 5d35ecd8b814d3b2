"""What makes arms comparable: equal settings outside the plug-ins, equal budgets, the same prompts and weights.

Before the runs, `check_arms` refuses what cannot be matched and lists what differs. After them, `match` compares what
each run recorded about itself: a hash of its initial weights, and a hash of the prompts of every generation batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.config import expand
from ..core.errors import ConfigError
from ..core.kinds import ROLLOUT_KINDS
from ..recipes.settings import BUDGETS
from .runs import Run

TOLERANCE = 0.05
"""Budgets that differ by less than this share count as equal."""

TOKENS = tuple(f"max_{kind}_tokens" for kind in BUDGETS)
STEPS = ("steps", "max_steps", "trainer.total_training_steps")
"""Settings that say how long a run is."""


@dataclass(frozen=True)
class Budget:
    """`steps`: every arm as many optimizer steps as its recipe says; otherwise a number of tokens."""

    kind: str = "steps"
    tokens: int | None = None

    @classmethod
    def read(cls, text: str) -> Budget:
        """`steps`, `generated=200000` or `update=200000`."""
        kind, sign, number = text.partition("=")
        if text == "steps":
            return cls()
        if kind in BUDGETS and sign and number.replace("_", "").isdigit() and int(number) > 0:
            return cls(kind, int(number))
        raise ConfigError(f"--budget: steps, generated=TOKENS or update=TOKENS, got {text!r}")

    def overrides(self) -> list[str]:
        """What a recipe is run with so that it ends at the budget."""
        return [] if self.tokens is None else [f"max_{self.kind}_tokens={self.tokens}"]

    def __str__(self) -> str:
        return "the same number of optimizer steps" if self.tokens is None else f"{self.tokens:,} {self.kind} tokens"


@dataclass(frozen=True)
class Difference:
    """A setting outside the plug-ins that an arm does not share with the baseline."""

    arm: str
    setting: str
    baseline: Any
    value: Any


def check_arms(
    settings: Mapping[str, Mapping[str, Any]], baseline: str, *, metrics: Sequence[str], budget: Budget
) -> list[Difference]:
    """What the arms do not share with the baseline outside their plug-ins.

    settings  arm -> the `identity` of its runs, without the seed
    Raises ConfigError where no seed could be matched (host, model, task), where the metric is not the same quantity on
    both sides (`reward` of other rewards or weights), and where the budget is unequal or can't be kept.
    """
    if baseline not in settings:
        raise ConfigError(f"--baseline: no arm is called {baseline!r} (the arms are {', '.join(settings)})")
    if budget.tokens is not None:
        limit = f"max_{budget.kind}_tokens"
        for arm, setting in settings.items():
            if setting[limit] != budget.tokens:
                given = setting[limit]
                raise ConfigError(f"--budget {budget.kind}={budget.tokens}: arm {arm} was run with {limit}={given}")
            if setting["host"] == "verl" and not setting["plugins"]:
                raise ConfigError(
                    f"--budget {budget.kind}: on host verl tokens are counted in runs with plug-ins, and arm {arm} has"
                    " none; name one (advantage=grpo)"
                )
    flat = {arm: _flat(s) for arm, s in settings.items()}
    control = flat[baseline]
    found: list[Difference] = []
    for arm, own in flat.items():
        for key in sorted({*own, *control}):
            if own.get(key) != control.get(key):
                found.append(Difference(arm, key, control.get(key), own.get(key)))
    for d in found:
        if d.setting in ("host", "model", "task", "profile"):
            raise ConfigError(
                f"arm {d.arm} has {d.setting} {d.value!r} and the baseline {d.baseline!r}: their runs would share"
                " neither data order nor weights; compare arms that differ in plug-ins"
            )
        if d.setting in ("rewards", "weights") and "reward" in metrics:
            raise ConfigError(
                f"arm {d.arm} has {d.setting} {d.value!r} and the baseline {d.baseline!r}: the metric 'reward' is not"
                " the same quantity on both sides; choose another --metric (accuracy)"
            )
        if d.setting in TOKENS or (d.setting in STEPS and budget.tokens is None):
            raise ConfigError(
                f"arm {d.arm} runs {d.setting}={d.value!r} and the baseline {d.baseline!r}: unequal budgets; give both"
                " the same, or --budget generated=TOKENS"
            )
    return found


def _flat(setting: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name, the plug-ins left out; weights that are not given are written out."""
    out: dict[str, Any] = {}
    for key, value in setting.items():
        if key in ("plugins", "seed"):
            continue
        if isinstance(value, Mapping) and value and key != "task":
            out |= _flat(value, "" if key == "arguments" else f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    if "weights" in out and out["weights"] is None:
        out["weights"] = [1.0] * len(out["rewards"])
    return out


@dataclass(frozen=True)
class Match:
    """How far a run is matched with the baseline's run of its seed; None: one of them did not record it.

    weights     whether the initial weights are equal
    steps       generation batches both made
    same        those with the same prompts
    first_other the first step whose prompts differ
    own_prompts the arm has parts that choose prompts or drop rollouts: other prompts are its doing
    """

    arm: str
    seed: int
    weights: bool | None
    steps: int
    same: int | None
    first_other: int | None
    own_prompts: bool

    @property
    def broken(self) -> bool:
        """Whether the pair must not be compared."""
        return self.weights is False or (self.first_other is not None and not self.own_prompts)

    @property
    def why(self) -> str:
        if self.weights is False:
            return "other initial weights than the baseline's run"
        return f"other prompts than the baseline's run from step {self.first_other}, without a part that chooses them"


def match(arm: str, run: Run, control: Run) -> Match:
    """Compare what two runs of one seed recorded about their weights and prompts."""
    weights = [(r.summary or {}).get("initial_weights") for r in (run, control)]
    prompts = [
        {r["step"]: r["rlx/prompts"] for r in x.records if r.get("rlx/prompts") is not None} for x in (run, control)
    ]
    shared = sorted(set(prompts[0]) & set(prompts[1]))
    other = [step for step in shared if prompts[0][step] != prompts[1][step]]
    return Match(
        arm,
        run.seed,
        weights=None if None in weights else weights[0] == weights[1],
        steps=len(shared),
        same=len(shared) - len(other) if shared else None,
        first_other=other[0] if other else None,
        own_prompts=chooses_prompts(run) or chooses_prompts(control),
    )


def chooses_prompts(run: Run) -> bool:
    """Whether a run has parts of the rollout side, which may draw other prompts or leave some out of the batch."""
    return any(kind in ROLLOUT_KINDS and value is not None for kind, value in expand(run.plugins).items())


@dataclass(frozen=True)
class Spent:
    """Mean budget of an arm's runs; None where a run did not record it."""

    steps: float | None
    generated_tokens: float | None
    update_tokens: float | None
    seconds: float | None


def spent(runs: Sequence[Run]) -> Spent:
    """Mean over the runs of what each had spent at its end."""

    def mean(name: str) -> float | None:
        last = [next((r[name] for r in reversed(run.records) if r.get(name) is not None), None) for run in runs]
        return sum(last) / len(last) if last and None not in last else None  # type: ignore[arg-type]

    return Spent(*(mean(n) for n in ("step", "generated_tokens", "update_tokens", "seconds")))


def unequal(arm: Spent, control: Spent) -> dict[str, float]:
    """Ratio to the baseline of each token budget that differs by more than TOLERANCE."""
    out = {}
    for name in ("generated_tokens", "update_tokens"):
        mine, theirs = getattr(arm, name), getattr(control, name)
        if mine is not None and theirs and abs(mine / theirs - 1) > TOLERANCE:
            out[name] = mine / theirs
    return out
