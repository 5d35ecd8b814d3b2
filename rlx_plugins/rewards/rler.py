"""RLER: rewards without labels, from the pooled votes of several models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, NamedTuple

import torch

from ..core.batch import RolloutBatch
from ..core.kinds import Columns, Reward
from ..core.params import param
from ..core.registry import register

Answers = Sequence[str | None]
DIGITS = 12
"""Shares that agree to this many decimals are equal."""


class Vote(NamedTuple):
    """Of one prompt: pseudo-label (None: nobody answered), disagreement of the members, weight of the hard reward, and
    per row the reward, its answer's share in the ensemble and the indices to train on."""

    label: str | None
    disagreement: float
    hardness: float
    rewards: list[float]
    confidence: list[float]
    selected: list[int]


@register("reward", "rler")
@dataclass
class RLER(Reward):
    """Self-rewarding favours the model's own confident mistakes; pooling the votes of several models takes the reward
    out of the policy's hand. It is hard (the majority's answer) where the ensemble agrees and soft (the answer's share)
    where it does not, and training may keep a mix of confident rows and of rows on which policy and ensemble differ.

        p_m(a) = share of answer a among member m's parsed answers,   p = mean over the members that answered
        a* = argmax p (ties: the smallest string),   D = mean over pairs of members of 1/2 sum_a |p_m - p_l|
        hardness = p(a*) (1 - D);   reward = hardness [a = a*] + (1 - hardness) p(a);   unparsed: 0
        selection of n_select rows: ceil(confident_share n_select) with the largest p(a), then the largest
        |p_policy(a) - p(a)|

    Reads answer [B], a list of canonical answer strings (None = not parsed), peer_answers [B], a list with, per row,
    the answers of each other member to the row's prompt (a list of lists, the same for the whole group), and group [B].
    The policy is the first member, its answers those of the group. Returns rewards [B] in [0, 1], answer_share,
    hardness, disagreement [B], pseudo_label (a list), and with n_select `keep`: the other rows leave before the
    advantage. Raw rewards are not read.

    The ensemble itself (a second policy in training, a frozen peer) is the user's. Every formula is a reconstruction
    from the abstract and reviews. One member and mode "hard" is majority voting (TTRL).
    """

    paper = "RLER: ensembled self-rewards for label-free reinforcement learning, arXiv 2510.08977"
    requires = frozenset({"answer", "peer_answers"})
    provides = frozenset({"answer_share", "hardness", "disagreement", "pseudo_label"})
    scope = "group"

    mode: Literal["adaptive", "hard", "soft"] | float = param(
        "adaptive", ge=0, le=1, doc="hardness: p(a*)(1 - D), 1, 0, or a number; reconstructed"
    )
    n_select: int | None = param(None, ge=1, doc="rows of a group that are trained; None: all")
    confident_share: float = param(0.5, ge=0, le=1, doc="share of them chosen by confidence; reconstructed")

    def __call__(self, batch: RolloutBatch) -> Columns:
        answers, peers = batch.answer, batch.peer_answers
        members: dict[int, list[int]] = {}
        for row, group in enumerate(batch.groups.index.tolist()):
            members.setdefault(group, []).append(row)
        table = torch.zeros(4, batch.size, dtype=batch.dtype)
        labels: list[str | None] = [None] * batch.size
        chosen = torch.zeros(batch.size, dtype=torch.bool)
        for rows in members.values():
            own = [answers[i] for i in rows]
            vote = self.vote(own, [own, *(peers[rows[0]] or [])])
            spread = [vote.hardness] * len(rows), [vote.disagreement] * len(rows)
            table[:, rows] = torch.tensor([vote.rewards, vote.confidence, *spread], dtype=batch.dtype)
            chosen[[rows[i] for i in vote.selected]] = True
            for i in rows:
                labels[i] = vote.label
        rewards, share, hardness, disagreement = table.to(batch.device)
        columns: dict[str, Any] = {
            "rewards": rewards,
            "answer_share": share,
            "hardness": hardness,
            "disagreement": disagreement,
            "pseudo_label": labels,
        }
        if self.n_select is not None:
            columns["keep"] = batch.keep & chosen.to(batch.device)
        return columns

    def vote(self, answers: Answers, by_model: Sequence[Answers], policy: int = 0) -> Vote:
        """The votes on one prompt: `answers` of the rows to reward, and of every member, `policy` among them."""
        shares = [_shares(given) for given in by_model]
        voting = [p for p in shares if p]
        if not voting:
            return Vote(None, 0.0, 0.0, [0.0] * len(answers), [0.0] * len(answers), list(range(len(answers))))
        pool = {a: sum(p.get(a, 0.0) for p in voting) / len(voting) for p in voting for a in p}
        label = min(pool, key=lambda a: (-round(pool[a], DIGITS), a))
        pairs = [_distance(p, q) for p, q in combinations(voting, 2)]
        disagreement = sum(pairs) / len(pairs) if pairs else 0.0
        hardness = self._hardness(pool[label], disagreement)
        confidence = [0.0 if a is None else pool.get(a, 0.0) for a in answers]
        rewards = [
            0.0 if a is None else hardness * (a == label) + (1 - hardness) * c
            for a, c in zip(answers, confidence, strict=True)
        ]
        own = shares[policy]
        gap = [0.0 if a is None else abs(own.get(a, 0.0) - c) for a, c in zip(answers, confidence, strict=True)]
        return Vote(label, disagreement, hardness, rewards, confidence, self._select(confidence, gap))

    def _hardness(self, top_share: float, disagreement: float) -> float:
        if self.mode == "adaptive":
            return top_share * (1 - disagreement)
        return {"hard": 1.0, "soft": 0.0}[self.mode] if isinstance(self.mode, str) else self.mode

    def _select(self, confidence: list[float], gap: list[float]) -> list[int]:
        n = len(confidence)
        if self.n_select is None or self.n_select >= n:
            return list(range(n))
        confident = math.ceil(self.confident_share * self.n_select - 1e-9)
        first = sorted(range(n), key=lambda i: (-round(confidence[i], DIGITS), i))[:confident]
        rest = sorted(set(range(n)) - set(first), key=lambda i: (-round(gap[i], DIGITS), i))
        return sorted([*first, *rest[: self.n_select - confident]])


def _shares(answers: Answers) -> dict[str, float]:
    """Share of each answer among those that were parsed; empty without any."""
    counts = Counter(a for a in answers if a is not None)
    total = counts.total()
    return {a: n / total for a, n in counts.items()}


def _distance(p: dict[str, float], q: dict[str, float]) -> float:
    """Total variation."""
    return sum(abs(p.get(a, 0.0) - q.get(a, 0.0)) for a in {*p, *q}) / 2
