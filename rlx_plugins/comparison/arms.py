"""The arms of a comparison, from the words of a command line: a recipe with overrides, or runs that exist."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import ConfigError
from ..recipes.run_folder import RunFolder
from ..recipes.schema import Recipe, load, with_overrides
from .runs import Run, read_run

_NAMED = re.compile(r"^([A-Za-z0-9][\w+.-]*)=(.+)$", re.S)
_NAME = re.compile(r"[^A-Za-z0-9_+.-]+")


@dataclass(frozen=True)
class Arm:
    """One side of a comparison.

    recipe  what is run, overrides applied; None for an arm of runs that exist
    runs    the runs that exist
    source  as it was written
    """

    name: str
    recipe: Recipe | None
    runs: tuple[Run, ...]
    source: str


def read_arms(
    words: Sequence[str], *, profile: str, overrides: Sequence[str] = (), host: str | None = None
) -> list[Arm]:
    """Arms from `[name=]recipe.yaml[:key=value,...]` or `[name=]folder`.

    A folder is a run or holds runs; a name given again adds its runs to the arm. `overrides` apply to every recipe,
    before its own; `host` chooses one of a recipe's hosts. ConfigError: fewer than two arms, or two of one name.
    """
    arms: dict[str, Arm] = {}
    for word in words:
        arm = _read_arm(word, profile, overrides, host)
        if arm.name in arms:
            before = arms[arm.name]
            if arm.recipe is not None or before.recipe is not None:
                raise ConfigError(
                    f"two arms are called {arm.name!r}: {before.source} and {arm.source}; name them: first={arm.source}"
                )
            arm = Arm(arm.name, None, before.runs + arm.runs, f"{before.source} {arm.source}")
        arms[arm.name] = arm
    if len(arms) < 2:
        raise ConfigError("a comparison needs two arms or more, the first of them the baseline unless --baseline says")
    for arm in arms.values():
        seeds = [run.seed for run in arm.runs]
        twice = sorted({s for s in seeds if seeds.count(s) > 1})
        if twice:
            raise ConfigError(f"arm {arm.name}: seed {twice[0]} occurs twice among the runs of {arm.source}")
    return list(arms.values())


def _read_arm(word: str, profile: str, overrides: Sequence[str], host: str | None) -> Arm:
    named = _NAMED.match(word)
    name, source = (named[1], named[2]) if named else (None, word)
    if Path(source).is_dir():
        return _existing(name or Path(source).name, Path(source))
    path, _, text = source.partition(":")
    own = split_words(text)
    recipe = with_overrides(load(path, host=host), [*overrides, *own], profile)
    made = _NAME.sub("-", "-".join([recipe.name, *own])).strip("-")
    return Arm(name or made, recipe, (), source)


def _existing(name: str, folder: Path) -> Arm:
    found = [folder] if RunFolder(folder).recipe.exists() else sorted(p.parent for p in folder.glob("*/recipe.json"))
    if not found:
        raise ConfigError(f"{folder}: neither a run (no recipe.json) nor a folder of runs")
    return Arm(name, None, tuple(read_run(path) for path in found), str(folder))


def split_words(text: str) -> list[str]:
    """`clip=ppo,rewards=[accuracy,format]` -> its words: commas inside brackets or quotes do not split."""
    words, depth, quote, start = [], 0, "", 0
    for i, c in enumerate(text):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in "[{(":
            depth += 1
        elif c in ")}]":
            depth -= 1
        elif c == "," and depth == 0:
            words.append(text[start:i])
            start = i + 1
    return [word for word in [*words, text[start:]] if word]


def read_seeds(text: str) -> list[int]:
    """`5` -> 0..4; `3,7,11` -> those."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds: a number of seeds, or seeds with commas, got {text!r}") from None
    seeds = list(range(numbers[0])) if len(numbers) == 1 else numbers
    if not seeds or len(set(seeds)) < len(seeds) or min(numbers) < 0:
        raise ConfigError(f"--seeds: one seed or more, each once, not negative; got {text!r}")
    return seeds
