"""The training loop of the simulated host: every phase of a step, in the order docs/architecture.md draws it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.batch import RolloutBatch, pack
from ...core.config import Parts, build
from ...core.context import Context
from ...core.errors import ConfigError
from ...core.objective import policy_loss
from ...core.preparation import Prepared, prepare
from ...core.rollout import drive, rollout_program
from .host import TableHost
from .policy import entropy
from .profile import PROFILE


class TableTrainer:
    """Trains the table with the plug-ins of a configuration; deterministic given the seed.

    config         {kind: spec} in the grammar of the configuration; a sampler is not needed: prompts come in order
    host           the simulated host; a fresh one unless given
    groups, group_size, max_tokens, total_steps   as in `Context`
    micro_batches  parts the rows of an update are split into; the result does not depend on it
    epochs         optimizer steps on each batch
    learning_rate  of Adam
    sync_every     steps between weight updates of the engine; above 1 the rollouts are stale
    seed           of the plug-ins' draws
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        host: TableHost | None = None,
        groups: int = 6,
        group_size: int = 8,
        max_tokens: int = 16,
        total_steps: int = 20,
        micro_batches: int = 1,
        epochs: int = 1,
        learning_rate: float = 0.1,
        sync_every: int = 1,
        seed: int = 0,
    ):
        self.host = host or TableHost(seed=seed)
        self.parts: Parts = build(config or {}, self.host.profile)
        for part in (*self.parts["drafter"], *self.parts["quant"]):
            raise ConfigError(
                f"{part.kind} {part.name}: the table host has no network; {PROFILE.remedy('engine_patch')}"
            )
        self.groups, self.group_size, self.max_tokens = groups, group_size, max_tokens
        self.total_steps, self.micro_batches, self.epochs = total_steps, micro_batches, epochs
        self.sync_every, self.seed = sync_every, seed
        self.optimizer = torch.optim.Adam(self.host.policy.parameters(), lr=learning_rate)
        self.step = self.offered = self.updates = 0
        self.log: list[dict[str, Any]] = []

    def run(self, steps: int | None = None) -> list[dict[str, Any]]:
        """Train `steps` steps (the rest of the run unless given); returns the log, one dict of metrics per step."""
        for _ in range(self.total_steps - self.step if steps is None else steps):
            self.train_step()
        return self.log

    def context(self) -> Context:
        """What the rollout program is told about the step at hand."""
        keys = list(self.host.prompts)
        first = self.offered % len(keys)
        return Context(
            step=self.step,
            total_steps=self.total_steps,
            groups=self.groups,
            group_size=self.group_size,
            max_tokens=self.max_tokens,
            prompts=self.host.prompts,
            offered=keys[first:] + keys[:first],
            columns=self.host.columns,
            version=self.host.engine.version,
            seed=self.seed,
        )

    def train_step(self) -> dict[str, Any]:
        """One step: generate, pack, score, credit, update, tell the parts. Returns its metrics, which join the log."""
        ticks, generated = self.host.engine.ticks, self.host.engine.generated
        ctx = self.context()
        batch = self.rollouts(ctx)
        prepared = prepare(self.parts, batch)
        metrics = self.update(prepared)
        if "values" in self.parts.requires and prepared.batch.has("returns"):
            self.host.fit_critic(prepared.batch)
        for part in self.parts.rollout:
            part.feedback(prepared.batch, ctx)
        self.offered += len(ctx.started)
        self.step += 1
        self.log.append(
            {
                "reward": float(batch.rewards.nanmean()),
                "rows": batch.size,
                "tokens": int(batch.response_mask.sum()),
                "ticks": self.host.engine.ticks - ticks,
                "generated": self.host.engine.generated - generated,
                "off_policy": float((batch.staleness[batch.response_mask] > 0).double().mean()),
                **ctx.metrics,
                **prepared.metrics,
                **metrics,
            }
        )
        return self.log[-1]

    def rollouts(self, ctx: Context) -> RolloutBatch:
        """The scored batch of the step with every column the parts require."""
        groups = drive(rollout_program(self.parts, ctx), self.host.execute)
        batch = pack(
            groups,
            version=self.updates,
            step=self.step,
            total_steps=self.total_steps,
            seed=self.seed,
            dtype=torch.float64,
        )
        return self.host.signals(batch, self.parts.requires)

    def update(self, prepared: Prepared) -> dict[str, float]:
        """The optimizer steps on one batch; the counts of every loss term are summed over all its rows first."""
        batch, metrics = prepared.batch, {}
        totals = {name: count.sum() for name, count in prepared.counts().items()}
        for _ in range(self.epochs):
            self.optimizer.zero_grad()
            total_loss = 0.0
            for rows in torch.arange(batch.size).chunk(self.micro_batches):
                loss, terms = self.loss(batch.rows(rows), totals)
                loss.backward()
                total_loss += float(loss.detach())
                metrics = {name: float(value) for name, value in terms.items()}
            self.optimizer.step()
        self.updates += 1
        reset = any(getattr(part, "reset_proximal", False) for part in self.parts["correction"])
        self.host.updated(self.updates, sync=(self.step + 1) % self.sync_every == 0, reset_prox=reset)
        return {"loss": total_loss, **metrics}

    def loss(self, rows: RolloutBatch, totals: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss phase of one micro-batch, its rows cut to the length a selector kept."""
        if rows.has("kept_length"):
            rows = rows.cut(max(int(rows.kept_length.max()), 1))
        logits = self.host.logits(rows)
        return policy_loss(
            self.parts,
            rows,
            self.host.logp(rows, logits),
            totals=totals,
            entropy=entropy(logits),
            logits=self.logit_columns(rows, logits),
        )

    def logit_columns(self, rows: RolloutBatch, logits: Tensor) -> dict[str, Tensor]:
        """What the parts make of the logits [B,T,V] while they exist; `teacher_logits` stand beside the columns."""
        made: dict[str, Tensor] = {}
        for part in self.parts.with_hook("from_logits"):
            teacher = self.host.teacher_logits(rows).detach()
            made |= part.from_logits(logits, {"teacher_logits": teacher, **rows.token_columns()})
        return made

    # ---- checkpoint
    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to be the run that was interrupted, at a step boundary."""
        return {
            "parts": self.parts.state_dict(),
            "host": self.host.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "offered": self.offered,
            "updates": self.updates,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.parts.load_state_dict(saved["parts"])
        self.host.load_state_dict(saved["host"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.offered, self.updates = saved["step"], saved["offered"], saved["updates"]
