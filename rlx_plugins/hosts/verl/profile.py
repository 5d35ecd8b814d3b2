"""What verl supplies and can do, as it is configured. Importing this module imports no host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...core.host import HostProfile
from ..signals import TOP_TOKENS, VALUES

ALWAYS = frozenset(
    "reward_components component_names hint_mask turn_ids segment_ids staleness helped source correct entropy logp_new"
    " logp_old logp_behavior prompt_ids".split()
)
"""Signals the trainer modes' batches carry in every configuration, beyond those of every host."""

UPDATE = frozenset({"logits", "cut_rows"})
PROGRAM = frozenset(
    "rounds until_group pause continue context row_temperature choose_prompts forward:logp"
    " forward:entropy forward:hidden forward:prompt_entropy".split()
)
CHUNKED = frozenset({"abort"})
HEAD = frozenset({"logits", "forward:hidden"})
"""What is read where the output head is called: a worker has to call it, on whole sequences."""

CAPABILITIES = UPDATE | PROGRAM | CHUNKED | {"ban_tokens", "reset_prox"}
"""Everything verl can do in its best configuration."""

SYNC, ASYNC = "rlx_sync", "rlx_colocate_async"
MODES = {SYNC: "sync", ASYNC: "colocate_async"}
"""Our trainer modes -> verl's modes they extend."""

FLAG_SIGNALS = frozenset("turn_ids segment_ids hint_mask".split())
"""Signals an advantage estimator named by verl's own flags can have, beyond those of every host."""

FLAG_LOSS_SIGNALS = frozenset({"logp_old", "logp_new"})
"""Signals a policy loss named by verl's own flags can have."""

TEACHER_MODES = frozenset("kl k1 abs mse k2 low_var_kl k3".split())
"""verl's distillation losses whose teacher reports the log-prob of the sampled tokens."""

ASKABLE = frozenset({"vllm", "rlx_hf"})
"""verl's engines whose requests take vLLM's own parameters: `logprobs` (top_tokens.py), `logit_bias`."""

PROCESSED = "processed_logprobs"
"""verl's default for vLLM: log-probs after temperature, top-p and top-k."""

USE_TRAINER = (
    "verl hands it to a trainer only; run `python -m rlx_plugins.hosts.verl` with trainer.v1.trainer_mode=rlx_sync and"
    " the plug-ins under rlx.plugins"
)
"""The remedy for what verl's own flags can't carry."""

_OWN_FIELD = (
    "a column of that name in the dataset (or an entry of its extra_info) supplies it, or a field named in"
    " rlx.rollout_signals that your agent loop returns in extra_fields or your reward function in its dictionary"
)
_VALUES = (
    "set rlx.value_model to a frozen value model or a function of yours, or critic.enable=True for verl's own critic;"
    f" else {_OWN_FIELD}"
)
_CHUNK = "verl returns finished responses only; set rlx.generation_chunk=N and rows come back every N response tokens"
_HEAD = "set ulysses_sequence_parallel_size=1 in actor and actor.fsdp_config, and model.use_fused_kernels=False"
_TOP_TOKENS = (
    "verl hands on the sampled token's log-prob; host verl asks further ones of a plain engine:"
    " actor_rollout_ref.rollout.name=vllm (rlx_hf on the CPU), logprobs_mode=processed_logprobs,"
    " disaggregation.enabled=False, and agent.default_agent_loop=single_turn_agent; else return them from your agent"
    " loop in extra_fields and name them in rlx.rollout_signals"
)
_ROLLOUT = "rollout-side plug-ins run with trainer.v1.trainer_mode=rlx_sync, where rollouts are made inside the step"


def host_profile(config: Any, mode: str, columns: Iterable[str] = ()) -> HostProfile:
    """What verl supplies and can do under `config` (its Hydra configuration) in a trainer mode of ours.

    columns  names of the training data's columns, entries of `extra_info` included: they are signals too
    """
    chosen = options(config)
    signals = set(ALWAYS) | set(columns) | set(chosen["rollout_signals"] or ())
    capabilities = set(UPDATE)
    remedies: dict[str, str] = {
        "logp_ref": "set actor_rollout_ref.actor.use_kl_loss=True (kl_loss_coef=0 for the signal alone): verl keeps a"
        " reference model only then",
        "logp_rollout": "set actor_rollout_ref.rollout.calculate_log_probs=True",
        **dict.fromkeys(("logp_prox", "reset_prox"), "set rlx.prox_decay, and the training workers keep an average"),
        **dict.fromkeys(VALUES, _VALUES),
        "confidence": f"it is made of logits: {_HEAD}, or return it from your agent loop and name it in"
        " rlx.rollout_signals",
        "logp_teacher": "give verl a teacher (distillation.enabled=True and its other options) with"
        " distillation.distillation_loss.loss_mode=k1, which reports the log-prob of every token",
        "teacher_logits": "verl's teachers are servers that return the log-probs of a few tokens",
        **dict.fromkeys(TOP_TOKENS, _TOP_TOKENS),
        "engine_patch": "verl starts its engine itself; the engine's own options are rollout.engine_kwargs",
        "abort": _CHUNK,
        "unlearn": "verl's servers take whole weight syncs only; host table can",
        "tools": "the rollout program generates with verl's servers directly; tools are called by verl's agent loops",
        "ban_tokens": "it is vLLM's logit_bias: set actor_rollout_ref.rollout.name=vllm (rlx_hf on the CPU)",
        "domain": "add a column of that name to the dataset, or an entry to its extra_info",
    }
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    if actor["use_kl_loss"]:
        signals.add("logp_ref")
    distillation = config["distillation"]
    if distillation["enabled"] and distillation["distillation_loss"]["loss_mode"] in TEACHER_MODES:
        signals.add("logp_teacher")
    if rollout["calculate_log_probs"]:
        signals.add("logp_rollout")
    if _reports_top_tokens(rollout):
        signals |= TOP_TOKENS
    if mode == SYNC:
        signals.add("rollout")
        capabilities |= PROGRAM
        if chosen["generation_chunk"] is not None:
            capabilities |= CHUNKED
        if rollout.get("name", "vllm") in ASKABLE:
            capabilities.add("ban_tokens")
    else:
        remedies |= dict.fromkeys(PROGRAM | CHUNKED | {"ban_tokens", "rollout"}, _ROLLOUT)
    if sequence_parallel(actor) > 1 or actor.get("use_fused_kernels", False):
        capabilities -= HEAD
        remedies |= dict.fromkeys(HEAD - remedies.keys(), _HEAD)
    if "logits" in capabilities:
        signals.add("confidence")
    if chosen["value_model"] is not None or config["critic"].get("enable"):
        signals |= VALUES
    if chosen["prox_decay"] is not None:
        signals.add("logp_prox")
        capabilities.add("reset_prox")
    return HostProfile("verl", frozenset(signals), frozenset(capabilities), remedies, _OWN_FIELD)


def sequence_parallel(actor: Mapping[str, Any]) -> int:
    """Processes that share a sequence (Ulysses): verl takes the option of the actor, older, or of its FSDP engine."""
    return max(part.get("ulysses_sequence_parallel_size", 1) for part in (actor, actor.get("fsdp_config", {})))


def _reports_top_tokens(rollout: Mapping[str, Any]) -> bool:
    """Whether verl's engine can be asked for its likeliest tokens, at the temperature it samples with."""
    agent = rollout.get("agent") or {}
    return (
        rollout.get("name", "vllm") in ASKABLE
        and rollout.get("logprobs_mode", PROCESSED) == PROCESSED
        and not (rollout.get("disaggregation") or {}).get("enabled")
        and agent.get("default_agent_loop", "single_turn_agent") == "single_turn_agent"
        and not agent.get("agent_loop_manager_class")
    )


OPTIONS: dict[str, Any] = {
    "plugins": None,
    "reward_components": None,
    "generation_chunk": None,
    "success_threshold": 0.5,
    "seed": 0,
    "request_seeds": False,
    "rollout_signals": None,
    "value_model": None,
    "prox_decay": None,
    "keep_versions": None,
    "max_generated_tokens": None,
    "max_update_tokens": None,
}
"""The group `rlx` of the configuration, with its defaults; config/rlx_trainer.yaml says what each is."""


def options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The group `rlx` of a configuration, defaults filled in."""
    given = config.get("rlx") or {}
    return {name: given.get(name, default) for name, default in OPTIONS.items()}
