"""Configuration of the TRL host: `RLXConfig`, and what is refused before a model is loaded."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from ...core.config import Parts, parse_overrides
from ...core.errors import ConfigError
from ...core.kinds import Plugin
from ..signals import OPTION, check_names
from ..value_model import check_value_model
from .profile import NEEDS_ROWS_BY_INDEX, column_names


@dataclass
class RLXConfig(GRPOConfig):
    """`GRPOConfig` plus the plug-ins of a run; also a dataclass for `TrlParser` and `HfArgumentParser`.

    plugins           a mapping in Python and YAML; on a command line a JSON mapping or the words of the common grammar:
                      `--plugins "advantage=dvao clip=bapo clip.target=1.0"`
    generation_chunk  response tokens per call of the engine. None: a call goes on until its rows end or reach a pause
    teacher_model     a model with the policy's vocabulary, for parts that read a teacher: a path, or "policy" for the
                      policy itself (which as teacher sees what a hint put into `teacher_context`)
    rollout_signals   fields that your `rollout_func` returns beside TRL's own, or a reward function reports with
                      `log_extra`, as signals of the batch: one value per row, or one list per row for values by token
                      (as many as the response has), turn or node
    value_model       a frozen value model, the source of `values` and `value_prior`: path or hub name of a token or
                      sequence classifier with one label, or "package.module:function" (see hosts/value_model.py)
    prox_decay        keep an averaged policy, the source of logp_prox: weight of the old values after an optimizer step
                      in a bias-corrected average (W / (W + 2) for a staleness of W optimizer steps)
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + ["plugins"]

    plugins: dict | str | None = field(
        default=None,
        metadata={
            "help": 'Plug-ins by kind: a mapping, a JSON mapping, or words such as "advantage=dvao clip=bapo'
            ' clip.target=1.0".'
        },
    )
    generation_chunk: int | None = field(
        default=None,
        metadata={
            "help": "Response tokens per call of the engine when rollout-side plug-ins are named. Parts that move"
            " groups on one by one, or end generation early, need it; every chunk re-reads the prefix."
        },
    )
    teacher_model: str | None = field(
        default=None,
        metadata={"help": 'Path of the teacher that plug-ins read, or "policy" for the policy itself.'},
    )
    rollout_signals: list[str] | None = field(
        default=None,
        metadata={"help": "Names of the extra fields your rollout_func or reward functions report, for plug-ins."},
    )
    value_model: str | None = field(
        default=None,
        metadata={
            "help": "A frozen value model (path, hub name) or package.module:function, for plug-ins that read it."
        },
    )
    prox_decay: float | None = field(
        default=None,
        metadata={"help": "Keep an averaged policy (signal logp_prox) with this weight of the old value per step."},
    )

    def __post_init__(self) -> None:
        if isinstance(self.plugins, str):
            self.plugins = _parsed(self.plugins)
        super().__post_init__()
        if self.plugins is not None and not isinstance(self.plugins, Mapping):
            raise ConfigError(f"plugins: expected a mapping or 'kind=name ...' words, got {self.plugins!r}")
        if self.plugins is not None:
            self.plugins = {kind: _plain(value) for kind, value in self.plugins.items()}
        self.rollout_signals = list(check_names(OPTION, self.rollout_signals)) or None
        if self.generation_chunk is not None and self.generation_chunk < 1:
            raise ConfigError(f"generation_chunk: must be >= 1 token, got {self.generation_chunk}")
        if self.prox_decay is not None and not 0 <= self.prox_decay < 1:
            raise ConfigError(f"prox_decay: must be in [0, 1), got {self.prox_decay}")


def _parsed(text: str) -> Any:
    """`plugins` of a command line: JSON where it begins like it, else words of the common grammar."""
    try:
        return json.loads(text) if text.lstrip().startswith("{") else parse_overrides(shlex.split(text))
    except json.JSONDecodeError as error:
        raise ConfigError(f"plugins: not JSON: {error}, in {text}") from None
    except ConfigError as error:
        raise ConfigError(f"plugins: {error}") from None
    except ValueError as error:  # of shlex: a quotation that is not closed
        raise ConfigError(f"plugins: {error}, in {text}") from None


def _plain(value: Any) -> Any:
    """The value with plug-in objects written out, so that the configuration can be saved."""
    if isinstance(value, Plugin):
        return {"name": value.name, **value.params()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return dict(value) if isinstance(value, Mapping) else value


REPLACED = {
    "loss_type": "name an aggregate and a clip instead",
    "importance_sampling_level": "name a ratio instead",
    "epsilon": "use clip.eps_low",
    "epsilon_high": "use clip.eps_high",
    "delta": "use clip.dual_clip",
    "scale_rewards": "use advantage.scale",
    "multi_objective_aggregation": "name an advantage that combines several rewards",
    "top_entropy_quantile": "name a selector",
    "off_policy_mask_threshold": "name a correction",
}
"""GRPOConfig fields whose work the plug-ins do -> where the same thing is said to them."""


def check_options(args: GRPOConfig, parts: Parts, *, own_rollouts: bool, dataset: Any) -> None:
    """Refuse options that would silently do nothing or that the loss of the plug-ins can't honour."""
    defaults = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
    for name, remedy in REPLACED.items():
        if (value := getattr(args, name)) != defaults[name]:
            raise ConfigError(
                f"{name}={value!r} would have no effect: the plug-ins decide this; leave it at {defaults[name]!r}"
                f" and {remedy}"
            )
    steps, window = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps
    if steps % window:
        raise ConfigError(
            f"gradient_accumulation_steps={window} must divide steps_per_generation * num_iterations = {steps}: an"
            " optimizer step over several generation batches has no known token count when its first loss is computed;"
            " leave steps_per_generation unset (it then equals gradient_accumulation_steps) or use a multiple"
        )
    if parts["drafter"]:
        raise ConfigError(
            f"drafter {parts.one('drafter').name}: drafts are made inside the engine, which TRL starts with fixed"
            " arguments; start `vllm serve` with the drafter and use vllm_mode='server'"
        )
    if parts["correction"] and not args.use_vllm and not own_rollouts:
        raise ConfigError(
            f"correction {parts.one('correction').name} weighs the mismatch between engine and trainer, but here"
            " transformers samples with the trainer's own model and every weight would be 1; set use_vllm=True, pass a"
            " rollout_func that returns logprobs, or remove the correction"
        )
    if needs_program(parts):
        seeing = [*parts.rollout, *parts.with_hook("annotate"), *(p for p in parts if "rollout" in p.requires)]
        who = seeing[0]
        label = f"{who.kind} {who.name}"
        if own_rollouts:
            raise ConfigError(
                f"{label} acts while rollouts are made, but a rollout_func, tools or an environment_factory generate"
                " here; remove them"
            )
        if not hasattr(dataset, "__getitem__"):
            raise ConfigError(f"{label} acts while rollouts are made: {NEEDS_ROWS_BY_INDEX}")
        if {"image", "images"} & set(column_names(dataset)):
            raise ConfigError(f"{label} acts while rollouts are made, which works on text only; the dataset has images")
    if getattr(args, "value_model", None) is not None:
        check_value_model(args.value_model)
    for part in parts:
        for column in sorted(getattr(part, "token_columns", ())):
            if column not in column_names(dataset):
                raise ConfigError(
                    f"{part.kind} {part.name} reads the dataset column {column!r} as tokens, but the dataset has"
                    f" {', '.join(column_names(dataset)) or 'no named columns'}"
                )


def check_saving(args: GRPOConfig, save_steps: float) -> None:
    """Refuse checkpoints inside a generation batch: its completions are not saved, so a resumed run would differ."""
    updates = args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps
    if args.save_only_model or args.save_strategy == "no" or args.save_strategy == "epoch":
        return
    if save_steps >= 1 and save_steps % updates:
        raise ConfigError(
            f"save_steps={save_steps:g} falls inside a generation batch, which spans {updates} optimizer steps here and"
            f" is not part of a checkpoint; use a multiple of {updates}"
        )


def needs_program(parts: Parts) -> bool:
    """Whether generation has to run as the rollout program: a rollout-side part, or one that sees rollouts."""
    return bool(parts.rollout or parts.with_hook("annotate") or "rollout" in parts.requires)


def corrects_sampling(parts: Parts) -> bool:
    """Whether a part accounts for the mismatch between engine and trainer, so that TRL's own correction must not."""
    dividers = (parts.one("ratio"), *parts["clip"])
    return bool(parts["correction"]) or any(p.denominator not in (None, "logp_old") for p in dividers)
