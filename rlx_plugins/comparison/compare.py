"""`rlx compare`: plan, run or collect, analyse, report."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..recipes.run_folder import read_json, write_json
from .arms import Arm, read_arms, read_seeds
from .protocol import Budget, Difference, check_arms
from .report import write_report
from .results import Results, analyse
from .runs import Planned, Run, execute, identity, locked

PLAN = "comparison.json"
LINE = 110


@dataclass
class Comparison:
    """A comparison as it is planned, before a run is made.

    arms         by name
    seeds        what every recipe is run with; those of the runs where all arms are existing runs
    metrics      the first decides; empty: accuracy, or reward where no task measures it
    effect       a difference of that metric, for the planning of seeds
    differences  settings outside the plug-ins that arms do not share with the baseline
    """

    output: Path
    arms: list[Arm]
    baseline: str
    seeds: list[int]
    profile: str
    metrics: list[str]
    budget: Budget
    level: float = 0.95
    effect: float | None = None
    differences: list[Difference] = field(default_factory=list)

    @classmethod
    def plan(
        cls,
        words: Sequence[str],
        *,
        output: Path | None = None,
        seeds: str | None = None,
        profile: str = "tiny",
        baseline: str | None = None,
        metrics: Sequence[str] = (),
        budget: str = "steps",
        overrides: Sequence[str] = (),
        host: str | None = None,
        level: float = 0.95,
        effect: float | None = None,
    ) -> Comparison:
        """Read the arms and refuse what can't be matched. Nothing is written."""
        chosen = Budget.read(budget)
        arms = read_arms(words, profile=profile, host=host, overrides=[*overrides, *chosen.overrides()])
        existing = sorted({run.seed for arm in arms for run in arm.runs})
        to_run = any(arm.recipe is not None for arm in arms)
        planned = read_seeds(seeds or "5") if to_run or seeds else existing
        if overrides and not to_run:
            raise ConfigError("--set: there is no recipe to run, all arms are runs that exist")
        first = baseline or arms[0].name
        settings = {arm.name: _setting_of(arm, profile) for arm in arms}
        name = "-".join(arm.name for arm in arms)[:60]
        return cls(
            output=output or Path("runs") / f"compare-{name}",
            arms=arms,
            baseline=first,
            seeds=planned,
            profile=profile,
            metrics=list(metrics),
            budget=chosen,
            level=level,
            effect=effect,
            differences=check_arms(settings, first, metrics=metrics, budget=chosen),
        )

    def runs_to_make(self) -> list[Planned]:
        """Seed by seed, so that an interrupted comparison has whole pairs."""
        return [
            Planned(arm.name, arm.recipe, self.profile, seed, self.output / arm.name / f"seed-{seed}")
            for seed in self.seeds
            for arm in self.arms
            if arm.recipe is not None
        ]

    def open(self, *, resume: bool) -> None:
        """Write the plan to the folder, or check that the folder holds this one.

        Raises ConfigError when it holds a comparison and `resume` is not set, or another one.
        """
        path = self.output / PLAN
        mine = json.loads(json.dumps(self._record()))
        arms = {arm.name: _setting_of(arm, self.profile) for arm in self.arms}
        if not path.exists():
            self.output.mkdir(parents=True, exist_ok=True)
            write_json(path, mine)
            return
        if not resume:
            raise ConfigError(f"{self.output} already holds a comparison; use --resume, or another --output")
        before = read_json(path)
        changed = [key for key in mine if key != "arms" and mine[key] != before.get(key)]
        planned = {name: _without_seed(identity(setting)) for name, setting in before["arms"].items()}
        changed += ["arms"] * (planned != arms)
        if changed:
            raise ConfigError(
                f"{self.output} holds a comparison that was planned otherwise ({', '.join(changed)}); a plan is not"
                " changed after the first look. Use another --output; runs that exist can be collected:"
                f" name={self.output / self.arms[0].name}"
            )

    def _record(self) -> dict[str, Any]:
        return {
            "arms": {arm.name: _settings_in(arm, self.profile)[0] for arm in self.arms},
            "baseline": self.baseline,
            "seeds": self.seeds,
            "profile": self.profile,
            "metrics": self.metrics,
            "budget": str(self.budget),
            "level": self.level,
            "effect": self.effect,
        }

    def execute(self, *, jobs: int = 1, tell: Callable[[str], None]) -> None:
        """Make the runs that are missing."""
        todo = self.runs_to_make()
        with locked(self.output):
            for planned in todo:
                planned.write_recipe()
            execute(todo, jobs=jobs, tell=tell)

    def collect(self) -> dict[str, list[Run]]:
        """Arm -> its runs, as far as they got."""
        made: dict[str, list[Run]] = {arm.name: list(arm.runs) for arm in self.arms}
        for planned in self.runs_to_make():
            if planned.state() != "absent":
                made[planned.arm].append(planned.read())
        return made

    def report(self, *, command: str = "") -> Results:
        """Analyse the runs there are and write the report."""
        runs = self.collect()
        results = analyse(
            runs,
            self.baseline,
            planned=self.seeds,
            metrics=self.metrics,
            budget=self.budget,
            level=self.level,
            effect=self.effect,
            differences=self.differences,
        )
        write_report(self.output, results, runs, setting=self._setting_lines(runs), command=command)
        return results

    def _setting_lines(self, runs: Mapping[str, Sequence[Run]]) -> list[str]:
        lines = [f"`{arm.name}`: {_plugins_text(arm, self.profile)}" for arm in self.arms]
        lines.append(f"profile {self.profile}, seeds {', '.join(map(str, self.seeds))}")
        made_by = sorted({_made_by(run) for of_arm in runs.values() for run in of_arm})
        lines.append(f"made by {'; '.join(made_by) or 'no run'}")
        if len(made_by) > 1:
            lines.append("**The runs were not all made by the same code and versions.**")
        return lines


def _settings_in(arm: Arm, profile: str) -> list[dict[str, Any]]:
    """What an arm runs, or what each of its runs was."""
    if arm.recipe is not None:
        return [{"recipe": arm.recipe.model_dump(mode="json"), "profile": profile, "seed": 0}]
    return [dict(run.setting) for run in arm.runs]


def _setting_of(arm: Arm, profile: str) -> dict[str, Any]:
    """The `identity` of an arm's runs, which must agree, without the seed."""
    found = [_without_seed(identity(setting)) for setting in _settings_in(arm, profile)]
    for setting in found:
        if setting != found[0]:
            other = [key for key in setting if setting[key] != found[0].get(key)]
            raise ConfigError(f"arm {arm.name}: its runs differ in {', '.join(other)}; one arm is one setting")
    return found[0]


def _without_seed(setting: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in setting.items() if key != "seed"}


def _plugins_text(arm: Arm, profile: str) -> str:
    plugins = _setting_of(arm, profile)["plugins"]
    if not plugins:
        return "no plug-in, the host as it is"
    written = {kind: value if isinstance(value, str) else json.dumps(value) for kind, value in plugins.items()}
    return ", ".join(f"{kind} `{value}`" for kind, value in written.items())


def _made_by(run: Run) -> str:
    versions = run.setting.get("versions") or {}
    parts = [f"rlx-plugins {run.setting.get('rlx_plugins', 'of unknown version')}"]
    parts += [f"code {run.setting['code']}"] if run.setting.get("code") else []
    return ", ".join([*parts, *(f"{name} {version}" for name, version in versions.items())])


def this_command() -> str:
    """The command line that was typed, for the report; long ones over several lines."""
    lines = ["rlx"]
    for word in map(shlex.quote, sys.argv[1:]):
        if len(lines[-1]) + len(word) > LINE:
            lines.append(" ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines)
