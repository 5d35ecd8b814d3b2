"""Loss and backward of each clip against TRL's own `_compute_loss` arithmetic on [64, 2048] tokens.

    python benchmarks/objective.py

TRL's method runs unchanged on an object that has only what it reads; its forward pass is replaced by given
log-probabilities, so what is timed is the arithmetic from log-probabilities to gradients, its metrics included.
"""

from __future__ import annotations

import torch
from _measure import machine, medians, table

import rlx_plugins as rlx
from rlx_plugins.core.registry import builtin_names
from rlx_plugins.testing.oracles import trl_compute_loss

ROWS, TOKENS = 64, 2048
SETTINGS = {"dro": {"penalty_coef": 0.1}}
"""Parameters of the clips that have no default for them."""


def main() -> None:
    print(f"{machine()}\n")
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(ROWS, TOKENS, generator=g) * 2 - 0.05
    new = (old + 0.1 * torch.randn(ROWS, TOKENS, generator=g)).requires_grad_()
    lengths = torch.randint(TOKENS // 4, TOKENS + 1, (ROWS,), generator=g)
    mask = torch.arange(TOKENS) < lengths[:, None]
    advantages = torch.randn(ROWS, generator=g)
    batch = rlx.RolloutBatch(
        {
            "group": torch.arange(ROWS) // 8,
            "row_id": torch.arange(ROWS),
            "rewards": torch.rand(ROWS, generator=g),
            "response_mask": mask,
            "logp_old": old,
            "logp_rollout": old + 0.01 * torch.randn(ROWS, TOKENS, generator=g),
            "staleness": torch.ones(ROWS, TOKENS, dtype=torch.int64),
            "keep": torch.ones(ROWS, dtype=torch.bool),
            "gapo_eps_high": torch.full((ROWS,), 0.28),
        }
    )
    host = rlx.HostProfile("benchmark", frozenset({"logp_old", "logp_rollout", "staleness", "entropy"}))

    def trl() -> None:
        loss = trl_compute_loss("dapo", new, old, advantages, mask)
        torch.autograd.grad(loss, new)

    candidates = {"TRL dapo": trl}
    for name in sorted(builtin_names("clip")):
        try:
            parts = rlx.build({"clip": {"name": name, **SETTINGS.get(name, {})}}, host)
        except rlx.ConfigError as error:
            print(f"left out: {error}\n")
            continue
        prepared = rlx.prepare(parts, batch)
        totals = {k: v.sum() for k, v in prepared.counts().items()}

        def ours(p=parts, b=prepared.batch, t=totals) -> None:
            loss, _ = rlx.policy_loss(p, b, new, totals=t)
            torch.autograd.grad(loss, new)

        candidates[name] = ours
    print(table(f"loss and gradient on [{ROWS}, {TOKENS}]", medians(candidates, seconds=2.0), ["TRL dapo"]))


if __name__ == "__main__":
    main()
