"""CADENCE's bootstrapped self-distillation: at the end of a run, what the policy answers consistently and rightly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.batch import RolloutBatch
from ..core.context import Context
from ..core.errors import ConfigError
from ..core.kinds import Replay
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.terms import masked_mean
from ..core.trajectory import Group, Rollout

SELF_DISTILLED = "self_distilled"
"""Entry of `rollout.extras`, and column: 1 on rows that are trained as by supervised fine-tuning."""


class Verdict(NamedTuple):
    """Of one prompt: share of its most frequent answer, whether it is accepted, and the rows kept, best first."""

    share: float
    accepted: bool
    rows: list[int]


@register("replay", "cadence")
@dataclass
class CADENCE(Replay):
    """Collects the rollouts of prompts that the policy answers consistently and correctly; in the last `phase` of the
    run it trains on these alone, as supervised fine-tuning without a teacher. Consistent but wrong prompts stay out.

    A prompt with at least `min_samples` rollouts is accepted if the share of its most frequent answer (ties: first in
    alphabetical order) is at least `min_consistency` and every rollout with this answer is correct; it gives up to
    `max_per_prompt` of them, those with the largest mean log-probability. Responses that were cut off do not vote.
    A later verdict on a prompt replaces the earlier one.

    Answers are the column `answer`, a normalised string per row (None: not parsed), or, with `marker`, the model's
    tokens after the last occurrence of these token ids. Reads correct [B], finished [B] and logp_old [B,T].

    In the phase a step's groups are drawn from the buffer, nothing is generated, and rows carry the column
    `self_distilled`, to which `advantage: cadence` gives advantage 1. With `clip: gpg` and `aggregate:
    seq_mean_token_mean` (`method: cadence`) the loss is minus the mean over rows of their mean log-probability; with a
    clipped ratio that holds for the gradient of a batch's first update. While nothing is accepted ordinary steps go on.
    All parameters are reconstructed.
    """

    paper = "CADENCE: Closing the Reasoning Gap for Tiny Language Models on Edge Hardware, arXiv 2607.16955"
    provides = frozenset({SELF_DISTILLED})
    fixes = {"advantage": "cadence"}

    min_consistency: float = param(0.6, ge=0, le=1, doc="least share of the most frequent answer; reconstructed")
    min_samples: int = param(4, ge=1, doc="rollouts a prompt needs for a vote; reconstructed")
    max_per_prompt: int | None = param(2, ge=1, doc="rows kept of a prompt; None: all; reconstructed")
    phase: float = param(0.1, ge=0, le=1, doc="share of the run, at its end, that trains on the buffer; reconstructed")
    marker: tuple[int, ...] | None = param(
        None, doc="token ids before the answer in a response; None: the column `answer` is given"
    )

    buffer: list = state(factory=list)

    def check(self) -> None:
        if self.marker == ():
            raise ConfigError("replay cadence.marker: expected at least one token id")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"rollout", "correct", "logp_old"} | (set() if self.marker else {"answer"}))

    def intake(self, need: int, ctx: Context) -> tuple[list[Group], int]:
        known = [g for g in self.buffer if g["prompt_key"] in ctx.prompts]
        if not self.in_phase(ctx) or not known:
            return [], need
        ranked = sorted(known, key=lambda g: ctx.uniform("cadence/order", g["id"]))
        replayed = [Group.from_plain(g) for g in ranked[:need]]
        for g in replayed:
            g.extras.update(ctx.columns(g.prompt_key))
        ctx.log("replay/self_distilled", len(replayed))
        return replayed, 0

    def feedback(self, batch: RolloutBatch, ctx: Context) -> None:
        """Hold the vote on the step's own rollouts."""
        own = [i for i, r in enumerate(batch.rollout) if SELF_DISTILLED not in r.extras and bool(batch.finished[i])]
        answers = [self._answer(batch.rollout[i]) if self.marker else batch.answer[i] for i in own]
        likelihood = masked_mean(batch.logp_old, batch.response_mask, dim=1)
        verdicts = self.vote(
            [batch.rollout[i].group for i in own],
            answers,
            [float(batch.correct[i]) == 1 for i in own],
            [float(likelihood[i]) for i in own],
        )
        accepted = [[batch.rollout[own[i]] for i in v.rows] for v in verdicts.values() if v.accepted]
        judged = {batch.rollout[i].prompt_key for i in own}
        new = {rows[0].prompt_key: _as_group(rows) for rows in accepted}
        self.buffer = [g for g in self.buffer if g["prompt_key"] not in judged] + list(new.values())
        ctx.log("replay/cadence_buffer", len(self.buffer))

    def vote(
        self,
        group: Sequence[Hashable],
        answers: Sequence[str | None],
        correct: Sequence[bool],
        mean_logp: Sequence[float],
    ) -> dict[Hashable, Verdict]:
        """The verdict on every group of rows."""
        members: dict[Hashable, list[int]] = {}
        for i, g in enumerate(group):
            members.setdefault(g, []).append(i)
        return {g: self._verdict(rows, answers, correct, mean_logp) for g, rows in members.items()}

    def _verdict(
        self, rows: list[int], answers: Sequence[str | None], correct: Sequence[bool], mean_logp: Sequence[float]
    ) -> Verdict:
        counts = Counter(a for i in rows if (a := answers[i]) is not None)
        if not counts:
            return Verdict(0.0, False, [])
        majority = min(counts, key=lambda a: (-counts[a], a))
        share = counts[majority] / len(rows)
        with_it = [i for i in rows if answers[i] == majority]
        accepted = len(rows) >= self.min_samples and share >= self.min_consistency and all(correct[i] for i in with_it)
        best = sorted(with_it, key=lambda i: -mean_logp[i])[: self.max_per_prompt]
        return Verdict(share, accepted, best if accepted else [])

    def in_phase(self, ctx: Context) -> bool:
        """Whether this step trains on the buffer."""
        return ctx.step >= math.ceil((1 - self.phase) * ctx.total_steps - 1e-9)

    def _answer(self, r: Rollout) -> str | None:
        """The tokens after the last marker, as text; None without one."""
        assert self.marker is not None
        tokens, n = r.tokens, len(self.marker)
        starts = [i for i in range(len(tokens) - n + 1) if tuple(tokens[i : i + n]) == self.marker]
        return " ".join(map(str, tokens[starts[-1] + n :])) if starts else None


def _as_group(rows: list[Rollout]) -> Mapping[str, Any]:
    """Rollouts of one prompt as a stored group; the log-probs of the policy that sampled them play no part any more."""
    first = rows[0]
    kept = [Rollout.from_plain(r.to_plain() | {"extras": {SELF_DISTILLED: 1.0}}) for r in rows]
    for r in kept:
        for s in r.segments:
            s.logp = s.logp_behavior = s.top = None
    group = Group(first.group, first.prompt_key, list(first.prompt), rollouts=kept, fresh=False, planned=True)
    return group.to_plain()
