"""Train a recipe with verl: a profile becomes a `python -m rlx_plugins.hosts.verl` command, run in the run's folder."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.config import OPTIONS, specs
from ...core.errors import ConfigError, RLXError, close_matches
from ...recipes.run_folder import RunFolder
from ...recipes.schema import Profile, Recipe
from ...recipes.task import load_model_path, load_object

Progress = Callable[[Mapping[str, Any]], None]

MODULE = "rlx_plugins.hosts.verl"
COMPONENTS = ("accuracy", "format", "brevity")
"""Rewards of the tiny task."""

TINY = {"trainer.total_training_steps": 60, "trainer.save_freq": 20}
"""What a tiny run is unless the recipe says otherwise."""


@dataclass
class Command:
    """A verl run: Hydra overrides, and variables of the environment that it needs."""

    overrides: list[str]
    environment: dict[str, str]

    def argv(self) -> list[str]:
        return [sys.executable, "-m", MODULE, *self.overrides]

    def value(self, key: str) -> str | None:
        """The value an override gives `key`; the last one counts."""
        found = [o.partition("=")[2] for o in self.overrides if o.partition("=")[0].lstrip("+") == key]
        return found[-1] if found else None

    def text(self) -> str:
        """The command as a shell takes it, one override a line."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " \\\n  ".join([*words, f"python -m {MODULE}", *map(shlex.quote, self.overrides)])


def make_command(
    recipe: Recipe, profile: Profile, folder: RunFolder, *, seed: int, resume: bool, tiny: bool
) -> Command:
    """The verl run of a profile; `tiny`: on the CPU lane, with transformers generating."""
    train, held_out = task_files(profile, seed)
    model = load_model_path(profile.model)
    environment: dict[str, str] = {}
    if tiny:
        from .cpu import cpu_environment, cpu_overrides

        environment = cpu_environment()
        overrides = cpu_overrides(model, train, held_out, folder=folder.checkpoints)
        overrides += [f"{key}={value}" for key, value in TINY.items()]
    else:
        files = {"train": train, "val": held_out}
        overrides = [f"actor_rollout_ref.model.path={hydra_value(model)}"]
        overrides += [f"data.{split}_files={hydra_value(str(path))}" for split, path in files.items()]
    overrides += reward_overrides(profile) + plugin_overrides(recipe.plugins) + run_overrides(folder, seed, resume)
    if recipe.plugins and profile.task == "tiny":
        overrides.append(f"rlx.reward_components={hydra_value(profile.rewards)}")
    overrides += [f"{key}={hydra_value(value)}" for key, value in flatten(profile.arguments).items()]
    return Command(overrides, environment)


def plugin_overrides(plugins: Mapping[str, Any]) -> list[str]:
    """The recipe's plug-ins as overrides that add them key by key."""
    out = []
    for kind, value in plugins.items():
        if kind in OPTIONS or value is None:
            out.append(f"+rlx.plugins.{kind}={hydra_value(value)}")
            continue
        chosen = specs(kind, value)
        written = [spec["name"] if len(spec) == 1 else spec for spec in chosen]
        out.append(f"+rlx.plugins.{kind}={hydra_value(written if len(written) > 1 else written[0])}")
    return out


def run_overrides(folder: RunFolder, seed: int, resume: bool) -> list[str]:
    """Where the run writes, its seeds, and whether it goes on from a checkpoint."""
    return [
        f"trainer.default_local_dir={hydra_value(str(folder.checkpoints.absolute()))}",
        f"trainer.resume_mode={'auto' if resume else 'disable'}",
        "trainer.logger=[file]",
        f"hydra.run.dir={hydra_value(str(folder.path.absolute()))}",
        f"data.seed={seed}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"rlx.seed={seed}",
    ]


def task_files(profile: Profile, seed: int) -> tuple[str | Path, str | Path]:
    """Training and held-out parquet files: of the tiny task, or of a task "package.module:function" of your own.

    The function returns {"train": path, "eval": path} of files in verl's format.
    """
    if profile.task == "tiny":
        from .cpu.tiny import tiny_files

        return tiny_files(seed=seed)
    if ":" not in profile.task:
        raise ConfigError(f"unknown task {profile.task!r} (accepted: tiny, or package.module:function of your own)")
    made = load_object(profile.task, "task")()
    if not isinstance(made, Mapping) or not {"train", "eval"} <= set(made):
        raise ConfigError(
            f"task {profile.task}: on host verl it returns {{'train': path, 'eval': path}} of parquet files"
        )
    return str(made["train"]), str(made["eval"])


def reward_overrides(profile: Profile) -> list[str]:
    """The reward function: the tiny task's with a weight for each of its rewards, or one of your own."""
    function = "reward.custom_reward_function"
    if all(":" not in name for name in profile.rewards) and profile.task == "tiny":
        weights = profile.weights or [1.0] * len(profile.rewards)
        for name in profile.rewards:
            if name not in COMPONENTS:
                raise ConfigError(
                    f"unknown reward {name!r}{close_matches(name, COMPONENTS)} (the tiny task has"
                    f" {', '.join(COMPONENTS)}; your own: package.module:function)"
                )
        chosen = dict.fromkeys(COMPONENTS, 0.0) | dict(zip(profile.rewards, weights))
        path = "pkg://rlx_plugins.hosts.verl.cpu.tiny"
        out = [f"{function}.path={path}", f"{function}.name=compute_score"]
        return out + [f"+{function}.reward_kwargs.{name}={weight}" for name, weight in chosen.items()]
    if len(profile.rewards) != 1 or ":" not in profile.rewards[0] or profile.weights is not None:
        raise ConfigError(
            "host verl has one reward function, whose dictionary holds the components: rewards takes one"
            f" package.module:function and no weights, got {', '.join(profile.rewards)}"
        )
    module, _, name = profile.rewards[0].partition(":")
    return [f"{function}.path=pkg://{module}", f"{function}.name={name}"]


def train(
    recipe: Recipe,
    profile: Profile,
    folder: RunFolder,
    *,
    seed: int = 0,
    resume: bool = False,
    progress: Progress | None = None,
    tiny: bool = True,
) -> dict[str, Any]:
    """Run the training; metrics go to the folder step by step. Returns held-out accuracy before and after."""
    if importlib.util.find_spec("verl") is None:
        raise ConfigError("host verl is not installed; pip install 'rlx-plugins[verl]'")
    command = make_command(recipe, profile, folder, seed=seed, resume=resume, tiny=tiny)
    steps = command.value("trainer.total_training_steps")
    if tiny:  # verl's own validation, before the first step and after the last
        command.overrides += [f"trainer.test_freq={steps}", f"trainer.val_before_train={not resume}"]
    log = folder.path / "verl.log"
    metrics = folder.path / "verl_metrics.jsonl"
    metrics.unlink(missing_ok=True)
    environment = {**os.environ, **command.environment, "VERL_FILE_LOGGER_PATH": str(metrics.absolute())}
    environment.pop("RAY_ADDRESS", None)
    before = counted_before(folder) if resume else {}
    record = Records(
        folder,
        progress,
        max_steps=int(steps) if steps else None,
        tokens=before.get("generated_tokens") or 0,
        seconds=before.get("seconds") or 0.0,
    )
    with log.open("a") as output:
        process = subprocess.Popen(
            command.argv(), env=environment, cwd=folder.path, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                record.read(metrics)
                time.sleep(0.5)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    record.read(metrics)
    if process.returncode != 0:
        raise RLXError(f"verl ended with {process.returncode}; {log}:\n{last_error(log)}")
    return record.accuracy


def counted_before(folder: RunFolder) -> dict[str, Any]:
    """The record of the step whose checkpoint a resumed run goes on from."""
    tracker = folder.checkpoints / "latest_checkpointed_iteration.txt"
    step = int(tracker.read_text()) if tracker.exists() else 0
    return next((r for r in reversed(folder.records()) if r["step"] <= step), {})


class Records:
    """verl's file of metrics, taken over line by line into the run's folder."""

    def __init__(
        self, folder: RunFolder, progress: Progress | None, *, max_steps: int | None, tokens: int, seconds: float
    ):
        self.folder, self.progress, self.max_steps = folder, progress, max_steps
        self.tokens, self.seconds = tokens, seconds
        self.accuracy: dict[str, Any] = {}
        self.seen = 0
        self.started: float | None = None

    def read(self, path: Path) -> None:
        """Take over what has been written since the last call."""
        for step, data in list(self._lines(path))[self.seen :]:
            self.seen += 1
            if self.started is None:
                self.started = time.monotonic()
            self._take(step, data)

    def _lines(self, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        if path.exists():
            for line in path.read_text().split("\n")[:-1]:
                row = json.loads(line)
                yield row["step"], row["data"]

    def _take(self, step: int, data: dict[str, Any]) -> None:
        held_out = next((v for k, v in data.items() if k.startswith("val-") and "/accuracy/mean@" in k), None)
        if held_out is not None:
            self.accuracy["accuracy_before" if step == 0 else "accuracy_after"] = held_out
        if "critic/score/mean" not in data:
            return
        generated = data.get("rlx/generated_tokens")
        self.tokens += int(generated if generated is not None else data.get("perf/total_num_tokens", 0))
        record = {
            "step": step,
            "max_steps": self.max_steps,
            "reward": data["critic/score/mean"],
            "completion_length": data.get("response_length/mean"),
            "generated_tokens": self.tokens,
            "seconds": round(self.seconds + time.monotonic() - (self.started or time.monotonic()), 3),
            **{k: v for k, v in data.items() if isinstance(v, (int, float))},
        }
        self.folder.log(record)
        if self.progress is not None:
            self.progress(record)


def last_error(log: Path, lines: int = 15) -> str:
    """The end of a log, or our own error in it."""
    text = log.read_text(errors="replace").splitlines()
    own = [line for line in text if line.startswith("error: ") or "rlx_plugins.core.errors." in line]
    return own[-1] if own else "\n".join(text[-lines:])


def flatten(arguments: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Arguments by dotted key, whether they are written nested or dotted."""
    out: dict[str, Any] = {}
    for key, value in arguments.items():
        if isinstance(value, Mapping) and value and not key.startswith("+"):
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


def hydra_value(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{hydra_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    text = str(value)
    if re.fullmatch(r"[A-Za-z_./][\w./@+-]*", text) and text.lower() not in ("null", "true", "false", "nan", "inf"):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
