"""What TRL supplies and can do, as it is configured. Importing this module imports no host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...core.host import HostProfile

ALWAYS = frozenset(
    "reward_components component_names hint_mask turn_ids segment_ids staleness helped source correct entropy logp_new"
    " logp_old logp_behavior logp_rollout prompt_ids".split()
)
"""Signals TRL's batches carry in every configuration, beyond those of every host.

logp_rollout is vLLM's or the `rollout_func`'s; transformers' generate reports none, and samples with the trainer's own
weights and arithmetic: there the trainer's log-probs stand for it (corrections, which would be 1, are refused)."""

UPDATE = frozenset({"logits", "cut_rows"})
PROGRAM = frozenset(
    "rounds pause continue context row_temperature forward:logp forward:hidden forward:prompt_entropy".split()
)
CHUNKED = frozenset({"until_group", "abort"})
CAPABILITIES = UPDATE | PROGRAM | CHUNKED | {"choose_prompts", "teacher_logits"}
"""Everything TRL can do in its best configuration."""

NEEDS_ROWS_BY_INDEX = "it needs a dataset with a length and rows by index, not an iterable (streaming) one"
_CHUNK = "TRL generates in lock step; set generation_chunk=N and it hands rows back every N response tokens"
_OWN_COLUMN = "a dataset column of that name supplies it, or a field of your rollout_func named in rollout_signals"
_TEACHER = "set teacher_model to the path of a teacher, or to 'policy' for the policy itself"


def host_profile(args: Any, *, dataset: Any = None, own_rollouts: bool = False) -> HostProfile:
    """What TRL supplies and can do under `args` (a GRPOConfig), before any model is loaded.

    dataset       the training data: its columns are signals, and only rows by index let a sampler choose prompts
    own_rollouts  a `rollout_func`, tools or an environment generate: rollout-side plug-ins have no place then
    """
    signals = set(ALWAYS) | (set(column_names(dataset)) - {"prompt"})
    if own_rollouts:
        signals |= set(getattr(args, "rollout_signals", None) or ())
    capabilities = set(UPDATE)
    remedies = {
        "logp_ref": "set beta > 0: TRL keeps a reference model only then",
        "logp_prox": "set prox_decay, and the trainer keeps an averaged policy",
        "logp_teacher": _TEACHER,
        "teacher_logits": _TEACHER,
        "engine_patch": "TRL starts its engine with fixed arguments; run the engine as a server (vllm_mode='server')",
        "until_group": _CHUNK,
        "abort": _CHUNK,
        "choose_prompts": NEEDS_ROWS_BY_INDEX,
        "domain": "add a column of that name to the dataset",
    }
    if args.beta != 0.0:
        signals.add("logp_ref")
    if getattr(args, "prox_decay", None) is not None:
        signals.add("logp_prox")
    if getattr(args, "teacher_model", None) is not None:
        signals.add("logp_teacher")
        capabilities.add("teacher_logits")
    if own_rollouts:
        why = "a rollout_func, tools or environment_factory generate on their own; remove them"
        remedies |= dict.fromkeys(PROGRAM | CHUNKED | {"choose_prompts", "rollout"}, why)
    else:
        signals.add("rollout")
        capabilities |= PROGRAM
        if getattr(args, "generation_chunk", None) is not None:
            capabilities |= CHUNKED
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            capabilities.add("choose_prompts")
    return HostProfile("trl", frozenset(signals), frozenset(capabilities), remedies, _OWN_COLUMN)


def column_names(dataset: Any) -> Iterable[str]:
    """Names of the dataset's columns; nothing where it does not tell (a stream without features)."""
    return getattr(dataset, "column_names", None) or ()
