"""Loss and gradient with every clip and ratio against PPO, on one micro-batch.

    python benchmarks/objective.py [--rows 128] [--tokens 2048]

What is timed is the arithmetic from log-probabilities to gradients, metrics included; the batch phase is done before.
A clip that works with one ratio, aggregate or advantage only brings it along. TRL's `_compute_loss` runs unchanged on
an object that has only what it reads, its forward pass replaced by the same log-probabilities; verl's is its own
function. What a clip makes of the logits is measured apart, against the log-probabilities that are always made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from _batch import VOCABULARY, build, config, scored_batch, sizes
from _measure import against, machine, table

import rlx_plugins as rlx
from rlx_plugins.core.objective import logit_columns
from rlx_plugins.core.registry import builtin_names, implements
from rlx_plugins.testing.oracles import trl_compute_loss

TRL, VERL = "TRL dapo", "verl vanilla"
SHIFT = 0.1
"""Standard deviation of logp_new - logp_old, nats: some tokens are clipped."""
LOGITS = (4, 256, 16384)
"""[B,T,V] of the logits that clips look at."""

REASONS = {
    "ratio turn": "sorts the turn ids of every row, which may be any numbers, and sums over the turns",
    "a2tgpo": "the ratio `turn`; a range for every token",
    "bapo": "sums, in float64, what all tokens contribute under each of 22 candidate bounds",
    "clip_cov": "covariances; a reproducible random number for every token; selects the smallest",
    "sat": "selects a quantile of the drifts of all tokens; a range for every token, six metrics",
}


def configurations() -> dict[str, dict[str, Any]]:
    """What acts in the loss: clips, ratios, and advantages that are made anew there."""
    chosen = {name: config("clip", name) for name in sorted(builtin_names("clip"))}
    chosen |= {f"ratio {name}": config("ratio", name) for name in sorted(builtin_names("ratio"))}
    for name in sorted(builtin_names("advantage")):
        if implements(rlx.find("advantage", name), "in_loss"):
            chosen[f"advantage {name}"] = config("advantage", name)
    return chosen


def moved(batch: rlx.RolloutBatch) -> torch.Tensor:
    """logp_new [B,T] of a policy that has taken some steps."""
    return (batch.logp_old + SHIFT * torch.randn(batch.logp_old.shape)).requires_grad_()


def loss_and_gradient(chosen: Mapping[str, Any], batch: rlx.RolloutBatch, new: torch.Tensor) -> Callable[[], Any]:
    """One call of the loss phase and its backward pass."""
    parts = build(chosen, batch)
    prepared = rlx.prepare(parts, batch)
    totals = {term: count.sum() for term, count in prepared.counts().items()}
    made = logit_columns(parts, torch.randn(*new.shape, VOCABULARY), prepared.batch)

    def run() -> None:
        entropy = prepared.batch.entropy
        loss, _ = rlx.policy_loss(parts, prepared.batch, new, totals=totals, entropy=entropy, logits=made)
        torch.autograd.grad(loss, new)

    return run


def host_losses(batch: rlx.RolloutBatch, new: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The hosts' own clipped losses on the same numbers."""
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
    from verl.workers.config import ActorConfig

    advantages = batch.rewards - batch.rewards.mean()
    mask, spread = batch.response_mask, batch.spread(advantages)
    settings = ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=8)

    def trl() -> None:
        torch.autograd.grad(trl_compute_loss("dapo", new, batch.logp_old, advantages, mask), new)

    def verl() -> None:
        loss, _ = compute_policy_loss_vanilla(batch.logp_old, new, spread, mask.float(), "token-mean", settings)
        torch.autograd.grad(loss, new)

    return {TRL: trl, VERL: verl}


def logit_hooks(batch: rlx.RolloutBatch) -> tuple[Callable[[], Any], dict[str, Callable[[], Any]]]:
    """Log-probabilities of the sampled tokens with their gradient, and what clips make of the same logits."""
    rows, tokens, size = LOGITS
    batch = batch.rows(torch.arange(rows)).cut(tokens)
    logits = torch.randn(*batch.response_ids.shape, size, requires_grad=True)

    def log_probs() -> None:
        logp = logits.log_softmax(-1).gather(-1, batch.response_ids[..., None])
        torch.autograd.grad(logp.sum(), logits)

    hooks = {}
    for name in sorted(builtin_names("clip")):
        parts = build(config("clip", name), batch)
        if parts.with_hook("from_logits"):
            hooks[name] = lambda p=parts: logit_columns(p, logits, batch)
    return log_probs, hooks


def main() -> None:
    given = sizes(rows=128, tokens=2048)
    print(f"{machine()}\n")
    torch.manual_seed(0)
    batch = scored_batch(given.rows, given.tokens)
    new = moved(batch)
    candidates = {name: loss_and_gradient(chosen, batch, new) for name, chosen in configurations().items()}
    timed = against(candidates["ppo"], host_losses(batch, new) | candidates)
    title = f"loss and gradient on {list(new.shape)}, {int(batch.lengths.sum()):,} tokens"
    print(table(title, "ppo", timed, [TRL, VERL], REASONS))
    log_probs, hooks = logit_hooks(batch)
    print(table(f"columns made of logits {list(LOGITS)}", "log-probs and gradient", against(log_probs, hooks)))


if __name__ == "__main__":
    main()
