"""Rollout replay (the companion of DOTS): part of the batch is whole groups of recent steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..core.batch import RolloutBatch
from ..core.context import Context
from ..core.kinds import Replay
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.trajectory import Group

Stored = dict[str, Any]
"""A group as plain values (`Group.to_plain`)."""


@register("replay", "rollout_replay")
@dataclass
class RolloutReplay(Replay):
    """Only a share `fresh_share` of the batch is rolled out anew; the rest is groups drawn from a first-in-first-out
    buffer of recent ones.

    A replayed row keeps its tokens, its reward and the log-probabilities of the policy that sampled it, which reach the
    batch as `logp_rollout`; `clip: rollout_replay` divides by them (method `rollout_replay` names both).

    Per step: the buffer is reduced to the newest group of each prompt, without groups whose mean reward is exactly 0 or
    1 (`drop_degenerate`), unscorable ones, and groups with a row of unknown log-probabilities; n = floor((1 -
    fresh_share) * groups) of it are drawn uniformly without replacement (none in the first epoch, fewer where there are
    not as many: rlx/replay/short); the buffer is trimmed to its newest capacity - floor(fresh_share * groups) entries
    (capacity - groups in the first epoch) and the step's fresh groups are appended. Replayed groups stay in the buffer.

    The first epoch lasts until as many groups were rolled out as the dataset has prompts. If the engine reports no
    log-probabilities, those of the trainer at the time of the update are stored.
    """

    paper = (
        "Improving Data Efficiency for LLM Reinforcement Fine-tuning Through Difficulty-targeted Online Data Selection"
        " and Rollout Replay, arXiv 2506.05316"
    )

    fresh_share: float = param(0.5, gt=0, le=1, doc="share of the batch rolled out anew, sigma; the release's 0.5")
    capacity: int = param(512, ge=1, doc="groups in the buffer; the release's 512")
    drop_degenerate: bool = param(True, doc="leave out groups whose mean reward is exactly 0 or 1")

    buffer: list = state(factory=list)
    rolled_out: int = state(0)

    def intake(self, need: int, ctx: Context) -> tuple[list[Group], int]:
        self.buffer = self._clean([g for g in self.buffer if g["prompt_key"] in ctx.prompts])
        wanted = 0 if self._first_epoch(ctx) else math.floor((1 - self.fresh_share) * need + 1e-9)
        drawn = sorted(self.permutation(len(self.buffer), ctx)[:wanted])
        replayed = [Group.from_plain(self.buffer[i]) for i in drawn]
        for g in replayed:
            g.fresh = False
            g.extras.update(ctx.columns(g.prompt_key))
        ctx.log("replay/replayed", len(replayed))
        ctx.log("replay/short", wanted - len(replayed))
        return replayed, need - wanted

    def observe(self, groups: list[Group], ctx: Context) -> None:
        fresh = ctx.groups if self._first_epoch(ctx) else math.floor(self.fresh_share * ctx.groups + 1e-9)
        room = max(0, self.capacity - fresh)
        self.buffer = self.buffer[len(self.buffer) - room :] if room < len(self.buffer) else self.buffer
        self.buffer = self.buffer + [g.to_plain() | {"extras": {}} for g in groups]
        self.rolled_out += len(groups)
        ctx.log("replay/buffer", len(self.buffer))

    def feedback(self, batch: RolloutBatch, ctx: Context) -> None:
        """Where the engine reported no log-probabilities, keep the trainer's."""
        if not batch.has("rollout"):
            return
        sampled = batch.logp_old
        if batch.has("logp_behavior"):
            sampled = torch.where(torch.isnan(batch.logp_behavior), batch.logp_old, batch.logp_behavior)
        stored = {(r["group"], r["slot"]): r for g in self.buffer for r in g["rollouts"]}
        for row, r in enumerate(batch.rollout):
            saved = stored.get((r.group, r.slot))
            if saved is None or not _lacks_logp(saved):
                continue
            at = 0
            logp = sampled[row].tolist()
            for s in saved["segments"]:
                if s["logp"] is None and s["source"] in ("policy", "reused"):
                    s["logp"] = logp[at : at + len(s["tokens"])]
                at += len(s["tokens"])

    def permutation(self, n: int, ctx: Context) -> list[int]:
        """A random order of the buffer's positions."""
        return torch.randperm(n, generator=ctx.generator("rollout_replay/order")).tolist()

    def _first_epoch(self, ctx: Context) -> bool:
        return self.rolled_out < len(ctx.prompts)

    def _clean(self, buffer: list[Stored]) -> list[Stored]:
        """The newest group of each prompt that is worth replaying, in the order of the buffer."""
        newest = {g["prompt_key"]: i for i, g in enumerate(buffer)}
        last = [g for i, g in enumerate(buffer) if newest[g["prompt_key"]] == i]
        return [g for g in last if self._worth(g)]

    def _worth(self, group: Stored) -> bool:
        done = [r for r in group["rollouts"] if r["state"] == "finished"]
        rewards = [r["reward"] for r in done if r["reward"] is not None and not math.isnan(r["reward"])]
        if not rewards or any(map(_lacks_logp, done)):
            return False
        return not (self.drop_degenerate and sum(rewards) / len(rewards) in (0.0, 1.0))


def _lacks_logp(rollout: dict[str, Any]) -> bool:
    return any(s["logp"] is None and s["source"] in ("policy", "reused") for s in rollout["segments"])
