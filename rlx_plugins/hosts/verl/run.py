"""Train a recipe with verl: a profile becomes a `python -m rlx_plugins.hosts.verl` command, run in the run's folder."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.config import OPTIONS, specs
from ...core.errors import ConfigError, RLXError, close_matches
from ...recipes import data_task
from ...recipes.data_task import DataTask
from ...recipes.run_folder import RunFolder
from ...recipes.schema import Profile, Recipe
from ...recipes.settings import SAME, flatten
from ...recipes.task import check_task, is_tiny, load_model_path, load_object, reward_names, train_size
from ...testing.tiny_model import cached_folder, source_digest
from ..measures import checkpoint_hash

Progress = Callable[[Mapping[str, Any]], None]

MODULE = "rlx_plugins.hosts.verl"

TINY_ON_VERL = ("tiny", "tiny-few", "tiny-engine")
"""The tiny tasks that need no rollout code of their own here: verl's servers report log-probs."""

TINY = {"trainer.total_training_steps": 60, "trainer.save_freq": 20}
"""What a tiny run is unless the recipe says otherwise."""

ACTOR = "actor_rollout_ref.actor"

RAY_INIT = "ray_kwargs.ray_init"
"""verl's arguments of ray.init."""

OWN_CLUSTER = tuple(f"{RAY_INIT}.{key}" for key in ("num_cpus", "num_gpus", "object_store_memory", "include_dashboard"))
"""What ray.init takes only when it starts a cluster."""


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
        given = flatten(profile.arguments)
        ranks = math.prod(int(given.get(f"trainer.{key}", 1)) for key in ("nnodes", "n_gpus_per_node"))
        overrides = cpu_overrides(
            model, train, held_out or train, folder=folder.checkpoints, ranks=ranks, **tiny_sizes(profile)
        )
        overrides += [f"{key}={value}" for key, value in TINY.items()]
    else:
        files = {"train": train, "val": held_out or train}
        overrides = [f"actor_rollout_ref.model.path={hydra_value(model)}"]
        overrides += [f"data.{split}_files={hydra_value(str(path))}" for split, path in files.items()]
    if held_out is None:
        overrides += ["trainer.val_before_train=false", "trainer.test_freq=-1"]
    overrides += [f"{key}={hydra_value(value)}" for key, value in setting_overrides(profile).items()]
    overrides += reward_overrides(profile) + plugin_overrides(recipe.plugins) + run_overrides(folder, seed, resume)
    if recipe.plugins and all(":" not in name for name in profile.rewards):
        overrides.append(f"rlx.reward_components={hydra_value(profile.rewards)}")
    overrides += [f"{key}={hydra_value(value)}" for key, value in flatten(profile.arguments).items()]
    return Command(overrides, environment)


def tiny_sizes(profile: Profile) -> dict[str, Any]:
    """The settings that `cpu_overrides` sizes a run by."""
    given = {
        "prompts": profile.prompts_per_step,
        "rollouts": profile.group_size,
        "prompt_length": profile.max_prompt_length,
        "response_length": profile.max_response_length,
        "teacher": load_model_path(profile.teacher) if profile.teacher is not None else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def setting_overrides(profile: Profile) -> dict[str, Any]:
    """The profile's settings (recipes/settings.py) as verl's options. A step's rollouts are one mini-batch."""
    options = {
        name: value for name, value in profile.model_dump().items() if name in SAME["verl"] and value is not None
    }
    out = {key: options[name] for name in options for key in SAME["verl"][name]}
    if profile.max_prompt_length is not None:
        out["data.filter_overlong_prompts"] = True
    if profile.kl_coef is not None:
        out |= {f"{ACTOR}.use_kl_loss": profile.kl_coef > 0, f"{ACTOR}.kl_loss_coef": profile.kl_coef}
    if profile.teacher is not None:
        teacher = "distillation.teacher_models.teacher_model"
        out |= {"distillation.enabled": True, "distillation.distillation_loss.loss_mode": "k1"}
        out |= {f"{teacher}.key": "teacher", f"{teacher}.model_path": load_model_path(profile.teacher)}
    return out


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


def task_files(profile: Profile, seed: int) -> tuple[str | Path, str | Path | None]:
    """Training and held-out parquet files in verl's format; None for a task without held-out data.

    A function of your own, "package.module:function", returns {"train": path, "eval": path}.
    """
    task = profile.task
    if isinstance(task, DataTask):
        folder = cached_folder("verl-data", task.model_dump() | {"code": source_digest(data_task)}, task.verl_files)
        return folder / "train.parquet", folder / "eval.parquet" if task.eval else None
    if is_tiny(task):
        from .cpu.tiny import tiny_files

        if task not in TINY_ON_VERL:
            raise ConfigError(f"task {task} brings rollout code for host trl; host verl has {', '.join(TINY_ON_VERL)}")
        return tiny_files(train_size=train_size(task), seed=seed)
    check_task(task)
    made = load_object(task, "task")()
    if not isinstance(made, Mapping) or not {"train", "eval"} <= set(made):
        raise ConfigError(f"task {task}: on host verl it returns {{'train': path, 'eval': path}} of parquet files")
    return str(made["train"]), str(made["eval"])


def reward_overrides(profile: Profile) -> list[str]:
    """The reward function: the task's with a weight for each of its rewards, or one of your own."""
    function = "reward.custom_reward_function"
    known = reward_names(profile.task)
    if known is not None and all(":" not in name for name in profile.rewards):
        weights = profile.weights or [1.0] * len(profile.rewards)
        for name in profile.rewards:
            if name not in known:
                raise ConfigError(
                    f"unknown reward {name!r}{close_matches(name, known)} (the task has {', '.join(known)}; your own:"
                    " package.module:function)"
                )
        chosen = dict.fromkeys(known, 0.0) | dict(zip(profile.rewards, weights))
        module = "rlx_plugins.hosts.verl.cpu.tiny" if is_tiny(profile.task) else "rlx_plugins.recipes.answers"
        out = [f"{function}.path=pkg://{module}", f"{function}.name=compute_score"]
        out += [f"+{function}.reward_kwargs.{name}={weight}" for name, weight in chosen.items()]
        if is_tiny(profile.task) and profile.rollout_signals:
            out.append(f"+{function}.reward_kwargs.facts={hydra_value(profile.rollout_signals)}")
        return out
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
    """Run the training; metrics go to the folder step by step.

    Returns held-out accuracy before and after, and a hash of the initial weights.
    """
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
    if command.value(f"{RAY_INIT}.address") not in (None, "local"):
        told = {**command.environment, "VERL_FILE_LOGGER_PATH": str(metrics.absolute())}
        command.overrides = in_cluster(command.overrides, told)
    before = counted_before(folder) if resume else {}
    record = Records(
        folder,
        progress,
        max_steps=int(steps) if steps else None,
        tokens=before.get("generated_tokens") or 0,
        update_tokens=before.get("update_tokens") or 0,
        seconds=before.get("seconds") or 0.0,
    )
    with exit_on_sigterm(), log.open("a") as output:
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
    return record.accuracy | {"initial_weights": initial_weights(load_model_path(profile.model))}


def initial_weights(model: str) -> str | None:
    """Hash of the model's files, which verl has downloaded if they were on a hub; None where they lie elsewhere."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(model) if Path(model).is_dir() else Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return checkpoint_hash(folder)


def in_cluster(overrides: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The overrides of a run that joins a running cluster; its workers are told the environment.

    The processes that Ray started before do not have this process's environment.
    """
    kept = [word for word in overrides if word.partition("=")[0].lstrip("+") not in OWN_CLUSTER]
    return kept + [
        f"+{RAY_INIT}.runtime_env.env_vars.{name}={hydra_value(value)}" for name, value in environment.items()
    ]


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """In the main thread, SIGTERM ends what this process has started as well."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def counted_before(folder: RunFolder) -> dict[str, Any]:
    """The record of the step whose checkpoint a resumed run goes on from."""
    tracker = folder.checkpoints / "latest_checkpointed_iteration.txt"
    step = int(tracker.read_text()) if tracker.exists() else 0
    return next((r for r in reversed(folder.records()) if r["step"] <= step), {})


class Records:
    """verl's file of metrics, taken over line by line into the run's folder."""

    def __init__(
        self,
        folder: RunFolder,
        progress: Progress | None,
        *,
        max_steps: int | None,
        tokens: int,
        seconds: float,
        update_tokens: int = 0,
    ):
        self.folder, self.progress, self.max_steps = folder, progress, max_steps
        self.tokens, self.update_tokens, self.seconds = tokens, update_tokens, seconds
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
        self.tokens += int(generated if generated is not None else response_tokens(data))
        trained = data.get("rlx/update_tokens")
        self.update_tokens += int(trained or 0)
        record = {
            "step": step,
            "max_steps": self.max_steps,
            "reward": data["critic/score/mean"],
            "completion_length": data.get("response_length/mean"),
            "generated_tokens": self.tokens,
            "update_tokens": None if trained is None else self.update_tokens,
            "seconds": round(self.seconds + time.monotonic() - (self.started or time.monotonic()), 3),
            **{k: v for k, v in data.items() if isinstance(v, (int, float))},
        }
        self.folder.log(record)
        if self.progress is not None:
            self.progress(record)


def response_tokens(data: Mapping[str, Any]) -> int:
    """The response tokens of a step without plug-ins: verl reports the total, and the mean lengths of both parts."""
    response, prompt = data.get("response_length/mean", 0), data.get("prompt_length/mean", 0)
    total = data.get("perf/total_num_tokens", 0)
    return round(total * response / (prompt + response)) if response else 0


def last_error(log: Path, lines: int = 15) -> str:
    """The end of a log, or our own error in it."""
    text = log.read_text(errors="replace").splitlines()
    own = [line for line in text if line.startswith("error: ") or "rlx_plugins.core.errors." in line]
    return own[-1] if own else "\n".join(text[-lines:])


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
