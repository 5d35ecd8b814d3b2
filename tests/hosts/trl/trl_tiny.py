"""A Llama of two layers, a task without downloads, and short runs of either trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOTrainer

from rlx_plugins.hosts.trl import RLXConfig, RLXTrainer
from rlx_plugins.testing.tiny_model import build_tiny_model, build_tiny_tokenizer

TRL_EQUIVALENT = {
    "advantage": {"name": "grpo", "host": "trl"},
    "ratio": {"name": "token", "log_clamp": None},
    "clip": "ppo",
    "aggregate": "token_mean",
}
"""Plug-ins that say what TRL's loss_type="dapo" does."""


def save_tiny_model(folder: Path) -> str:
    """An untrained model of 60 thousand parameters with its tokenizer, on disk."""
    tokenizer = build_tiny_tokenizer()
    build_tiny_model(tokenizer, hidden_size=32, layers=2, intermediate_size=64, heads=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def dataset(rows: int = 24, **columns: list[Any]) -> Dataset:
    """Prompts of different lengths with a `target` column."""
    prompts = [f"{i}+{i * i}=" for i in range(rows)]
    return Dataset.from_dict({"prompt": prompts, "target": list(range(rows)), **columns})


def digits(completions: list[str], **columns: Any) -> list[float]:
    """Share of digits in the completion."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def lower(completions: list[str], **columns: Any) -> list[float]:
    """Share of lower-case letters in the completion."""
    return [sum(c.islower() for c in text) / max(len(text), 1) for text in completions]


def token_values(prompts: list[list[int]], responses: list[list[int]], masks: list[list[bool]]) -> list[list[float]]:
    """A value model: 0.1 times the length of the prompt, plus a hundredth of the token that follows."""
    return [[0.1 * len(p) + 0.01 * t for t in tokens] for p, tokens in zip(prompts, responses)]


def config(folder: Path, **changes: Any) -> RLXConfig:
    """A configuration for a run of a few steps on the CPU."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 10,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 7,
    }
    return RLXConfig(**{**settings, **changes})


def trainer(model: str, folder: Path, cls: type = RLXTrainer, **changes: Any) -> GRPOTrainer:
    """A trainer ready to train; `changes` are arguments of the trainer, or of its configuration."""
    own = ("reward_funcs", "train_dataset", "callbacks", "peft_config", "rollout_func", "eval_dataset", "tools")
    given = {name: changes.pop(name) for name in own if name in changes}
    given.setdefault("reward_funcs", [digits, lower])
    given.setdefault("train_dataset", dataset())
    return cls(model=model, args=config(folder, **changes), **given)


def run(model: str, folder: Path, cls: type = RLXTrainer, **changes: Any) -> GRPOTrainer:
    """A trainer that has trained."""
    t = trainer(model, folder, cls, **changes)
    t.train()
    return t


def weights(t: GRPOTrainer) -> dict[str, Any]:
    """A copy of the trained weights."""
    return {name: p.detach().clone() for name, p in t.accelerator.unwrap_model(t.model).named_parameters()}


def logs(t: GRPOTrainer, *names: str) -> list[dict[str, float]]:
    """The logged numbers of every step; all but timings without `names`."""
    timings = ("time", "runtime", "per_second")
    rows = [row for row in t.state.log_history if "loss" in row]
    wanted = [{k: v for k, v in r.items() if (k in names if names else not any(w in k for w in timings))} for r in rows]
    return wanted
