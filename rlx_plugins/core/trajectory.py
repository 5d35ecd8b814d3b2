"""What the rollout program moves: segments of tokens, rollouts made of them, groups that share a baseline."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

_FORK = re.compile(r"fork:(\d+)@(\d+)")
"""What `Group.fork` writes into the tag of a fork."""

Source = Literal["policy", "reused", "hint", "tool"]
State = Literal["new", "running", "paused", "parked", "finished", "pruned"]
Stop = Literal["eos", "length", "aborted"]
Top = tuple[Tensor, Tensor]
"""Ids [n,K] (-1: none) and log-probabilities [n,K] (NaN: none) of the K likeliest tokens at each of n places."""


@dataclass
class Segment:
    """A run of response tokens with one origin.

    `policy` and `reused` tokens are the model's own; `hint` tokens were written for it; `tool` tokens came from an
    environment. `logp` is what the engine reported when it sampled the tokens (None: unknown), `logp_behavior` the
    log-probability under the sampling-time weights *and context* where that differs from the training prompt's.
    `version` counts the weight updates the sampling policy had seen. `trained=False` marks a shared prefix that is
    trained in another row; `imitated=True` marks hint tokens that are trained like the model's own. `top` is what the
    engine reported of its likeliest tokens where a part reads them.
    """

    tokens: list[int]
    source: Source = "policy"
    logp: list[float] | None = None
    version: int = -1
    turn: int = 0
    trained: bool = True
    logp_behavior: list[float] | None = None
    imitated: bool = False
    top: Top | None = field(default=None, compare=False)

    @property
    def from_model(self) -> bool:
        return self.source in ("policy", "reused")

    @property
    def counts(self) -> bool:
        """Whether the tokens are inside response_mask."""
        return self.trained and (self.from_model or self.imitated)

    def head(self, n: int) -> Segment:
        """The first `n` tokens, as a segment of its own."""
        cut = {name: values[:n] for name in ("logp", "logp_behavior") if (values := getattr(self, name)) is not None}
        top = None if self.top is None else (self.top[0][:n], self.top[1][:n])
        return dataclasses.replace(self, tokens=self.tokens[:n], top=top, **cut)

    def extend(self, tokens: list[int], logp: list[float] | None = None, top: Top | None = None) -> None:
        """Append tokens with what the engine reported when it sampled them (None: unknown)."""
        old, new = len(self.tokens), len(tokens)
        self.tokens = self.tokens + tokens
        self.logp = _joined(self.logp, old, logp, new)
        self.logp_behavior = _joined(self.logp_behavior, old, None, new)
        if self.top is not None or top is not None:
            (ids, values), (more_ids, more_values) = _known(self.top, old, top), _known(top, new, self.top)
            self.top = torch.cat([ids, more_ids]), torch.cat([values, more_values])

    def to_plain(self) -> dict[str, Any]:
        """The fields as a dict of plain values that shares nothing with the segment: what a part keeps as state."""
        return _unshared(vars(self))

    @classmethod
    def from_plain(cls, saved: Mapping[str, Any]) -> Segment:
        """The segment that `to_plain` made `saved` of."""
        return cls(**_unshared(saved))


@dataclass
class Rollout:
    """One answer to one prompt, finished or not.

    `slot` is its index in the group, `wave` counts the launches (rows started together share one). `prompt` is the
    training prompt; `context` is put after it while sampling only; `teacher_context` is what a privileged teacher sees.
    `max_tokens` bounds the response, `pause_at` is the response length at which the engine hands the row back.
    `banned` are token ids the next sampled token may not be; the engine reports the log-probability of that token as if
    nothing had been banned, or as unknown, and empties the list.
    `reward` and `components` are set by the host when the row finishes, before any shaping. `propensity` is the
    probability with which the row survived pruning; `keep=False` leaves it out of the update.
    """

    prompt_key: str
    group: str
    slot: int
    prompt: list[int]
    wave: int = 0
    context: list[int] = field(default_factory=list)
    teacher_context: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    temperature: float = 1.0
    max_tokens: int = 64
    pause_at: int | None = None
    banned: list[int] = field(default_factory=list)
    state: State = "new"
    stop: Stop | None = None
    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict)
    propensity: float = 1.0
    keep: bool = True
    tag: str = ""
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        """All response tokens, hints and tool output included."""
        return [t for s in self.segments for t in s.tokens]

    def __len__(self) -> int:
        """Response length in tokens."""
        return sum(len(s.tokens) for s in self.segments)

    def __bool__(self) -> bool:
        return True

    @property
    def done(self) -> bool:
        return self.state in ("finished", "pruned")

    @property
    def scorable(self) -> bool:
        """Finished with a reward that is a number."""
        return self.state == "finished" and self.reward is not None and not math.isnan(self.reward)

    @property
    def helped(self) -> bool:
        """A hint stands in the response or stood in the sampling context."""
        return bool(self.context) or any(s.source == "hint" for s in self.segments)

    @property
    def forked(self) -> tuple[int, int] | None:
        """The slot the rollout was forked from, and after how many tokens; None: it was not."""
        told = _FORK.fullmatch(self.tag)
        return (int(told[1]), int(told[2])) if told else None

    def finish(self, stop: Stop) -> None:
        self.state, self.stop = "finished", stop

    def to_plain(self) -> dict[str, Any]:
        """The fields as a dict of plain values that shares nothing with the rollout; segments are dicts too.

        `extras` is copied as it is: a part that wants the rollout saved keeps plain values and tensors there.
        """
        segments = [s.to_plain() for s in self.segments]
        return _unshared({**vars(self), "segments": None}) | {"segments": segments}

    @classmethod
    def from_plain(cls, saved: Mapping[str, Any]) -> Rollout:
        """The rollout that `to_plain` made `saved` of."""
        segments = [Segment.from_plain(s) for s in saved["segments"]]
        return cls(**_unshared({**saved, "segments": None}) | {"segments": segments})


@dataclass
class Group:
    """The rollouts of one prompt that share a baseline. `fresh=False`: brought from an earlier step, not sampled now.

    `extras` starts with the dataset's columns of the prompt; parts may add to it.
    """

    id: str
    prompt_key: str
    prompt: list[int]
    max_tokens: int = 64
    rollouts: list[Rollout] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)
    fresh: bool = True
    planned: bool = False

    def start(self, n: int) -> list[Rollout]:
        """Add `n` new rollouts, launched together."""
        wave = 1 + max((r.wave for r in self.rollouts), default=-1)
        first = 1 + max((r.slot for r in self.rollouts), default=-1)
        new = [
            Rollout(self.prompt_key, self.id, first + i, list(self.prompt), wave=wave, max_tokens=self.max_tokens)
            for i in range(n)
        ]
        self.rollouts += new
        return new

    def fork(self, rollout: Rollout, at: int, n: int) -> list[Rollout]:
        """Add `n` new rollouts that continue `rollout` after its first `at` response tokens.

        The copied prefix is not trained in the new rows (`trained=False`): it is trained once, in its own row.
        """
        prefix, left = [], at
        for segment in rollout.segments:
            take = min(left, len(segment.tokens))
            left -= take
            if take:
                prefix.append(dataclasses.replace(segment.head(take), trained=False))
        new = self.start(n)
        for r in new:
            r.segments = [dataclasses.replace(s) for s in prefix]
            r.prompt, r.context = list(rollout.prompt), list(rollout.context)
            r.temperature, r.tag = rollout.temperature, f"fork:{rollout.slot}@{at}"
        return new

    def wave(self) -> list[Rollout]:
        """The rollouts launched last."""
        last = max((r.wave for r in self.rollouts), default=0)
        return [r for r in self.rollouts if r.wave == last]

    def done(self) -> list[Rollout]:
        """The finished rollouts (pruned ones are not)."""
        return [r for r in self.rollouts if r.state == "finished"]

    def rewards(self) -> list[float]:
        """Raw rewards of the finished rollouts; NaN where a reward function could not score."""
        return [math.nan if r.reward is None else r.reward for r in self.done()]

    def success_rate(self, above: float = 0.0) -> float | None:
        """Share of scorable rollouts with a reward above `above`, weighted by 1/propensity; None without any."""
        scored = [r for r in self.rollouts if r.scorable]
        if not scored:
            return None
        total = sum(1 / r.propensity for r in scored)
        return sum(1 / r.propensity for r in scored if r.reward is not None and r.reward > above) / total

    @property
    def idle(self) -> bool:
        """Every rollout has ended."""
        return all(r.done for r in self.rollouts)

    @property
    def settled(self) -> bool:
        """No rollout is running: all have ended or stand at a pause."""
        return all(r.done or r.state == "paused" for r in self.rollouts)

    def to_plain(self) -> dict[str, Any]:
        """The fields as a dict of plain values that shares nothing with the group; its rollouts are dicts too."""
        rollouts = [r.to_plain() for r in self.rollouts]
        return _unshared({**vars(self), "rollouts": None}) | {"rollouts": rollouts}

    @classmethod
    def from_plain(cls, saved: Mapping[str, Any]) -> Group:
        """The group that `to_plain` made `saved` of."""
        rollouts = [Rollout.from_plain(r) for r in saved["rollouts"]]
        return cls(**_unshared({**saved, "rollouts": None}) | {"rollouts": rollouts})


def _joined(a: list[float] | None, n: int, b: list[float] | None, m: int) -> list[float] | None:
    """Two runs of n and m log-probs, NaN where unknown; None where both are."""
    if a is None and b is None:
        return None
    return (a if a is not None else [math.nan] * n) + (b if b is not None else [math.nan] * m)


def _known(top: Top | None, n: int, like: Top | None) -> Top:
    """The likeliest tokens of n places; where they are unknown, no entries, as many as `like` has."""
    if top is not None:
        return top
    assert like is not None
    ids, logp = like
    return ids.new_full((n, ids.shape[1]), -1), logp.new_full((n, logp.shape[1]), math.nan)


def _unshared(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with every list of numbers, dict and tensor copied."""
    return {name: list(value) if isinstance(value, list) else copy.deepcopy(value) for name, value in fields.items()}
