"""Settings of a profile that mean the same on every host, and the hosts' own arguments that say the same.

steps                training steps: batches of rollouts
max_generated_tokens, max_update_tokens   tokens sampled, or trained (once a pass), whose step is the last, if before
prompts_per_step     prompts of a step
group_size           rollouts per prompt, unless an allocator decides
updates_per_batch    passes over a step's rollouts, each one optimizer step
max_prompt_length, max_response_length   tokens; longer prompts are left out of the data
learning_rate, temperature, kl_coef      of the optimizer, of sampling, of the KL term to the reference policy
teacher              a model with the policy's vocabulary, for plug-ins that read a teacher
value_model          a frozen value model, for plug-ins that read values
prox_decay           weight of the old values in an averaged policy, for plug-ins that read logp_prox
generation_chunk     response tokens per call of the engine
rollout_signals      fields of rollout code or of a reward function to take as signals

One that is not given is the host's default. The run module of each host translates them (hosts/<host>/run.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

BUDGETS = ("generated", "update")
"""Kinds of token budget, `max_<kind>_tokens`: tokens sampled, those of rollouts that were dropped included; tokens that
optimizer steps gave a weight, once for each pass."""

SAME: dict[str, dict[str, tuple[str, ...]]] = {
    "trl": {
        "steps": ("max_steps",),
        "max_generated_tokens": (),
        "max_update_tokens": (),
        "prompts_per_step": ("generation_batch_size", "gradient_accumulation_steps", "steps_per_generation"),
        "group_size": ("num_generations",),
        "updates_per_batch": ("num_iterations",),
        "max_prompt_length": (),
        "max_response_length": ("max_completion_length",),
        "learning_rate": ("learning_rate",),
        "temperature": ("temperature",),
        "kl_coef": ("beta",),
        "teacher": ("teacher_model",),
        "value_model": ("value_model",),
        "prox_decay": ("prox_decay",),
        "generation_chunk": ("generation_chunk",),
        "rollout_signals": ("rollout_signals",),
    },
    "verl": {
        "steps": ("trainer.total_training_steps",),
        "max_generated_tokens": ("rlx.max_generated_tokens",),
        "max_update_tokens": ("rlx.max_update_tokens",),
        "prompts_per_step": ("data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size"),
        "group_size": (f"{_ROLLOUT}.n",),
        "updates_per_batch": (f"{_ACTOR}.ppo_epochs",),
        "max_prompt_length": ("data.max_prompt_length",),
        "max_response_length": ("data.max_response_length",),
        "learning_rate": (f"{_ACTOR}.optim.lr",),
        "temperature": (f"{_ROLLOUT}.temperature",),
        "kl_coef": (f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_coef"),
        "teacher": ("distillation.enabled", "distillation.teacher_models.teacher_model.model_path"),
        "value_model": ("rlx.value_model",),
        "prox_decay": ("rlx.prox_decay",),
        "generation_chunk": ("rlx.generation_chunk",),
        "rollout_signals": ("rlx.rollout_signals",),
    },
}
"""Host -> setting -> the host's arguments that say the same; given in a profile, they win over the setting."""


def flatten(arguments: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Arguments by dotted key, whether they are written nested or dotted."""
    out: dict[str, Any] = {}
    for key, value in arguments.items():
        if isinstance(value, Mapping) and value and not key.startswith("+"):
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out
