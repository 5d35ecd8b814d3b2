"""The engine of the simulated host: one token per running row and tick."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ...core import randomness
from ...core.operations import Abort, Generate, Unlearn
from ...core.trajectory import Rollout, Segment
from .policy import CALL, EOS, GOOD, START, TOOL, TablePolicy, previous_tokens, score, token_logp

Score = Callable[[Rollout], tuple[float | None, dict[str, float]]]


def verify(rollout: Rollout) -> tuple[float | None, dict[str, float]]:
    """The default reward: `score` of the response tokens."""
    return score(rollout.tokens, rollout.stop == "eos")


class TableEngine:
    """Executes `Generate` and `Abort` with a copy of the policy's weights.

    A token is drawn with a hash of seed, group, slot and position, so what a row becomes does not depend on which rows
    run beside it, and there is no generator to checkpoint.

    policy      whose table shape and arithmetic it uses
    prompts     prompt key -> row of the table
    seed        of the sampled tokens
    resolution  the engine holds the weights rounded to multiples of this, as a quantised engine would: its log-probs
                differ from the trainer's (0: they are equal)
    turns       model turns per response; a CALL token ends a turn, and one token of tool output follows
    score       reward and components of a finished row; None: could not be scored
    lengths     true response length (tokens) of a row, for studies of scheduling; None: rows end when they sample EOS
    ticks, generated   engine steps and tokens so far
    """

    def __init__(
        self,
        policy: TablePolicy,
        prompts: Mapping[str, int],
        *,
        seed: int = 0,
        resolution: float = 0.05,
        turns: int = 1,
        score: Score = verify,
        lengths: Callable[[Rollout], int] | None = None,
    ):
        self.policy, self.prompts, self.seed = policy, prompts, seed
        self.resolution, self.turns, self.score, self.lengths = resolution, turns, score, lengths
        self.ticks = self.generated = 0
        self.before: tuple[Tensor, Tensor] | None = None
        self.load(policy.theta, version=0)

    def load(self, theta: Tensor, version: int) -> None:
        """Take over the trainer's weights, which have seen `version` updates."""
        self.exact = theta.detach().clone()
        self.rounded, self.before = self._as_stored(self.exact), None
        self.version = version

    def _as_stored(self, theta: Tensor) -> Tensor:
        return (theta / self.resolution).round() * self.resolution if self.resolution else theta

    def unlearn(self, operation: Unlearn) -> None:
        """Sample from weights that have taken a step down the operation's loss, until `restore`."""
        self.before = (self.exact, self.rounded) if self.before is None else self.before
        theta = self.exact.clone().requires_grad_()
        rows = [r for r in operation.rollouts if len(r)]
        if rows:
            (gradient,) = torch.autograd.grad(operation.loss(*self._own_logp(rows, theta)), theta)
            self.exact = (theta - operation.lr * gradient).detach()
            self.rounded = self._as_stored(self.exact)

    def restore(self) -> None:
        """Sample from the trainer's weights again."""
        if self.before is not None:
            (self.exact, self.rounded), self.before = self.before, None

    def _own_logp(self, rows: list[Rollout], theta: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities [R,T] of the response tokens under weights `theta`, and which are the model's own."""
        width = max(map(len, rows))
        ids = torch.tensor([r.tokens + [EOS] * (width - len(r)) for r in rows])
        own = [[s.from_model for s in r.segments for _ in s.tokens] for r in rows]
        mask = torch.tensor([row + [False] * (width - len(row)) for row in own])
        prompt = torch.tensor([self.prompts[r.prompt_key] for r in rows])[:, None].expand_as(ids)
        helped = torch.tensor([bool(r.context) for r in rows])[:, None].expand_as(ids)
        logits = self.policy(prompt, previous_tokens(ids), helped, theta)
        temperature = torch.tensor([r.temperature for r in rows], dtype=logits.dtype).clamp(min=1e-6)
        return token_logp(logits / temperature[:, None, None], ids), mask

    def abort(self, operation: Abort) -> None:
        for r in operation.rollouts:
            r.state, r.stop = "parked", "aborted"

    @torch.no_grad()
    def generate(self, operation: Generate) -> None:
        """Tick until a group (or every row) has settled: finished rows are scored, rows at `pause_at` are paused."""
        rows = operation.rollouts
        for r in rows:
            r.stop = None
            self._settle(r)
        while running := [r for r in rows if r.state == "running"]:
            if operation.until == "group" and _some_group_settled(rows):
                return
            if len(rows) - len(running) >= operation.enough:
                return
            self._tick(running)

    def _tick(self, rows: list[Rollout]) -> None:
        """Every row gets one token."""
        self.ticks += 1
        self.generated += len(rows)
        prompt = torch.tensor([self.prompts[r.prompt_key] for r in rows])
        previous = torch.tensor([_last(r) for r in rows])
        helped = torch.tensor([bool(r.context) for r in rows])
        temperature = torch.tensor([r.temperature for r in rows], dtype=torch.float64).clamp(min=1e-6)[:, None]
        logits = self.policy(prompt, previous, helped, self.rounded) / temperature
        u = [randomness.uniform(self.seed, "table/token", r.group, r.slot, len(r)) for r in rows]
        above = _without_banned(logits, rows).softmax(-1).cumsum(-1) > torch.tensor(u, dtype=torch.float64)[:, None]
        ids = torch.where(above.any(1), above.to(torch.int8).argmax(1), EOS)
        if self.lengths is not None:
            at_end = torch.tensor([len(r) + 1 >= self.lengths(r) for r in rows])
            ids = torch.where(at_end, EOS, torch.where(ids == EOS, GOOD, ids))
        logp = token_logp(logits, ids).tolist()
        behavior = token_logp(self.policy(prompt, previous, helped, self.exact) / temperature, ids).tolist()
        for r, token, lp, lb in zip(rows, ids.tolist(), logp, behavior):
            self._append(r, token, lp, lb)
            r.banned = []
            self._settle(r)

    def _append(self, r: Rollout, token: int, logp: float, logp_behavior: float) -> None:
        turn = sum(s.source == "tool" for s in r.segments)
        last = r.segments[-1] if r.segments else None
        if last is None or (last.source, last.version, last.trained) != ("policy", self.version, True):
            last = Segment([], "policy", [], self.version, turn)
            last.logp_behavior = [] if r.context or self.before is not None else None
            r.segments.append(last)
        last.tokens.append(token)
        if last.logp is not None:
            last.logp.append(logp)
        if last.logp_behavior is not None:
            last.logp_behavior.append(logp_behavior)
        if token == CALL and turn + 1 < self.turns:
            r.segments.append(Segment([TOOL], "tool", turn=turn))

    def _settle(self, r: Rollout) -> None:
        """Finish and score the row, pause it, or leave it running."""
        ended = len(r) >= self.lengths(r) if self.lengths is not None else _last(r) == EOS
        if ended or len(r) >= r.max_tokens:
            r.finish("eos" if ended and len(r) <= r.max_tokens else "length")
            r.reward, r.components = self.score(r)
        elif r.pause_at is not None and len(r) >= r.pause_at:
            r.state = "paused"


def _without_banned(logits: Tensor, rows: list[Rollout]) -> Tensor:
    """Logits [n,V] with -inf at the tokens a row may not be continued with."""
    out = logits.clone()
    for i, r in enumerate(rows):
        out[i, r.banned] = -torch.inf
    return out


def _last(r: Rollout) -> int:
    """The token before the next one; START at the beginning of the response."""
    return next((s.tokens[-1] for s in reversed(r.segments) if s.tokens), START)


def _some_group_settled(rows: Iterable[Rollout]) -> bool:
    running: dict[str, bool] = {}
    for r in rows:
        running[r.group] = running.get(r.group, False) or r.state == "running"
    return not all(running.values())
