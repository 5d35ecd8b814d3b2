"""What TRL supplies and can do, as it is configured. Importing this module imports no host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...core.host import HostProfile
from ..signals import TOP_TOKENS, VALUES

ALWAYS = frozenset(
    "reward_components component_names hint_mask turn_ids segment_ids staleness helped source correct entropy logp_new"
    " logp_old logp_behavior logp_rollout confidence prompt_ids".split()
)
"""Signals TRL's batches carry in every configuration, beyond those of every host.

logp_rollout is vLLM's or the `rollout_func`'s; transformers' generate reports none, and samples with the trainer's own
weights and arithmetic: there the trainer's log-probs stand for it (corrections, which would be 1, are refused).
confidence, the probability of the policy's five likeliest tokens, takes a forward pass where a part reads it."""

LIKELIEST = TOP_TOKENS | {"confidence"}
"""Signals made of likeliest tokens: `confidence` of the policy's, TOP_TOKENS of the engine's. vLLM reports its own;
where transformers samples they are the policy's."""

UPDATE = frozenset({"logits", "cut_rows"})
PROGRAM = frozenset(
    "rounds pause continue context row_temperature forward:logp forward:entropy forward:hidden"
    " forward:prompt_entropy".split()
)
CHUNKED = frozenset({"until_group", "abort"})
CAPABILITIES = UPDATE | PROGRAM | CHUNKED | {"choose_prompts", "teacher_logits", "ban_tokens", "reset_prox"}
"""Everything TRL can do in its best configuration."""

NEEDS_ROWS_BY_INDEX = "it needs a dataset with a length and rows by index, not an iterable (streaming) one"
_CHUNK = "TRL generates in lock step; set generation_chunk=N and it hands rows back every N response tokens"
_OWN_COLUMN = (
    "a dataset column of that name supplies it, or a field named in rollout_signals that your rollout_func returns or a"
    " reward function reports with log_extra"
)
_PROX = "set prox_decay, and the trainer keeps an averaged policy"
_VALUES = f"set value_model to a frozen value model or a function of yours; else {_OWN_COLUMN}"
_TEACHER = "set teacher_model to the path of a teacher, or to 'policy' for the policy itself"


def host_profile(args: Any, *, dataset: Any = None, own_rollouts: bool = False) -> HostProfile:
    """What TRL supplies and can do under `args` (a GRPOConfig), before any model is loaded.

    dataset       the training data: its columns are signals, and only rows by index let a sampler choose prompts
    own_rollouts  a `rollout_func`, tools or an environment generate: rollout-side plug-ins have no place then
    """
    signals = set(ALWAYS) | (set(column_names(dataset)) - {"prompt"})
    signals |= set(getattr(args, "rollout_signals", None) or ())
    capabilities = set(UPDATE)
    remedies = {
        "logp_ref": "set beta > 0: TRL keeps a reference model only then",
        "logp_prox": _PROX,
        "reset_prox": _PROX,
        **dict.fromkeys(VALUES, _VALUES),
        "logp_teacher": _TEACHER,
        "teacher_logits": _TEACHER,
        "engine_patch": "TRL starts its engine with fixed arguments; run the engine as a server (vllm_mode='server')",
        "until_group": _CHUNK,
        "abort": _CHUNK,
        "ban_tokens": "only transformers' own generate bans a token at one place; set use_vllm=False and"
        " use_transformers_continuous_batching=False",
        "unlearn": "TRL keeps one set of weights for sampling and training; host table can",
        "tools": "TRL calls tools in its own generation only, where rollout-side plug-ins have no place",
        "choose_prompts": NEEDS_ROWS_BY_INDEX,
        "domain": "add a column of that name to the dataset",
    }
    if not own_rollouts:
        signals |= LIKELIEST
    if args.beta != 0.0:
        signals.add("logp_ref")
    if getattr(args, "prox_decay", None) is not None:
        signals.add("logp_prox")
        capabilities.add("reset_prox")
    if getattr(args, "value_model", None) is not None:
        signals |= VALUES
    if getattr(args, "teacher_model", None) is not None:
        signals.add("logp_teacher")
        capabilities.add("teacher_logits")
    if own_rollouts:
        why = "a rollout_func, tools or environment_factory generate on their own; remove them"
        remedies |= dict.fromkeys(PROGRAM | CHUNKED | {"ban_tokens", "choose_prompts", "rollout"}, why)
    else:
        signals.add("rollout")
        capabilities |= PROGRAM
        if getattr(args, "generation_chunk", None) is not None:
            capabilities |= CHUNKED
        if not (args.use_vllm or args.use_transformers_continuous_batching):
            capabilities.add("ban_tokens")
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            capabilities.add("choose_prompts")
    return HostProfile("trl", frozenset(signals), frozenset(capabilities), remedies, _OWN_COLUMN)


def column_names(dataset: Any) -> Iterable[str]:
    """Names of the dataset's columns; nothing where it does not tell (a stream without features)."""
    return getattr(dataset, "column_names", None) or ()
