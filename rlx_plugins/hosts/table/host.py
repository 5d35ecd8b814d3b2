"""The simulated host: a dataset, a policy with its engine, a reference and a teacher, and what they can do together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.batch import RolloutBatch
from ...core.operations import Abort, Forward, Generate, Operation, Restore, Unlearn
from ...core.trajectory import Rollout
from ...corrections.ppo_ewma import ProximalAverage
from .critic import TableCritic
from .engine import Score, TableEngine, verify
from .policy import EOS, GOOD, START, TablePolicy, entropy, previous_tokens, token_logp
from .profile import PROFILE

TOP = ("rollout_top_ids", "rollout_top_logp")


class TableHost:
    """Everything a host has, small enough to read.

    prompts     number of prompts, "p0", "p1", ...; prompt i is the one token 100 + i
    columns     further dataset columns of a prompt by key, beside solution (right tokens), hint (tokens for the
                context), domain (0, 1, 2) and prior (a guess of the success rate); they are signals too
    seed, resolution, turns, score, lengths   as in `TableEngine`
    fields      further columns by name, made of each finished rollout: what a user's rollout code would return
                beside its tokens, a number or one value per token
    prox_decay  weight of the old values in the averaged policy behind logp_prox
    """

    def __init__(
        self,
        prompts: int = 24,
        *,
        seed: int = 0,
        resolution: float = 0.05,
        turns: int = 1,
        score: Score = verify,
        lengths: Callable[[Rollout], int] | None = None,
        columns: Callable[[str], Mapping[str, Any]] | None = None,
        fields: Mapping[str, Callable[[Rollout], Any]] | None = None,
        prox_decay: float = 0.9,
    ):
        self.row = {f"p{i}": i for i in range(prompts)}
        self.prompts = {key: [100 + i] for key, i in self.row.items()}
        self.policy = TablePolicy(prompts, seed=seed)
        self.reference = self.policy.theta.detach().clone()
        self.teacher = self.reference.clone()
        self.teacher[:, :, GOOD] += 1.0
        self.average = ProximalAverage(prox_decay, [self.reference], settled=True)
        self.critic = TableCritic(prompts)
        self.engine = TableEngine(
            self.policy, self.row, seed=seed, resolution=resolution, turns=turns, score=score, lengths=lengths
        )
        self._columns, self.fields = columns, dict(fields or {})
        names = set(self.columns("p0")) | set(self.fields)
        self.profile = dataclasses.replace(PROFILE, signals=PROFILE.signals | names)

    @property
    def prox(self) -> Tensor:
        """The weights of the averaged policy."""
        return self.average.mean[0]

    def columns(self, key: str) -> dict[str, Any]:
        """Dataset columns of a prompt."""
        own = {
            "solution": [GOOD] * 5 + [EOS],
            "hint": [GOOD, GOOD],
            "domain": self.row[key] % 3,
            "prior": 0.5,
        }
        return own | dict(self._columns(key) if self._columns else {})

    # ---- the rollout side: operations of the rollout program
    def execute(self, operation: Operation) -> Any:
        """Carry out an operation a hook of the rollout program yielded."""
        if isinstance(operation, Generate):
            return self.engine.generate(operation)
        if isinstance(operation, Abort):
            return self.engine.abort(operation)
        if isinstance(operation, Unlearn):
            return self.engine.unlearn(operation)
        if isinstance(operation, Restore):
            return self.engine.restore()
        return self.forward(operation)

    @torch.no_grad()
    def forward(self, operation: Forward) -> list[Any]:
        """Score rollouts under the current policy; see `Forward` for what each `want` is."""
        answer = {
            "logp": self._logp,
            "entropy": self._entropy,
            "hidden": self._hidden,
            "prompt_entropy": self._prompt_entropy,
        }[operation.want]
        return [answer(r) for r in operation.rollouts]

    def _logits(self, r: Rollout, previous: list[int]) -> Tensor:
        prompt = torch.full((len(previous),), self.row[r.prompt_key])
        helped = torch.full((len(previous),), bool(r.context))
        return self.policy(prompt, torch.tensor(previous), helped) / max(r.temperature, 1e-6)

    def _logp(self, r: Rollout) -> list[float]:
        tokens = r.tokens
        if not tokens:
            return []
        return token_logp(self._logits(r, [START, *tokens[:-1]]), torch.tensor(tokens)).tolist()

    def _entropy(self, r: Rollout) -> list[float]:
        return entropy(self._logits(r, [START, *r.tokens[:-1]])).tolist()[: len(r)]

    def _hidden(self, r: Rollout) -> Tensor:
        """[6]: the next-token logits, the share of right steps so far, the length."""
        tokens = r.tokens
        seen = torch.tensor([tokens.count(GOOD) / max(len(tokens), 1), len(tokens) / r.max_tokens], dtype=torch.float64)
        return torch.cat([self._logits(r, [tokens[-1] if tokens else START])[0], seen])

    def _prompt_entropy(self, r: Rollout) -> float:
        return float(entropy(self._logits(r, [START]))[0])

    # ---- the update side: log-probabilities of a batch
    def logits(self, batch: RolloutBatch, theta: Tensor | None = None, helped: Tensor | None = None) -> Tensor:
        """[B,T,V] logits of the response tokens under the training prompt, divided by the row's temperature.

        `theta`: weights other than the policy's; `helped` [B] bool: rows whose context counts (the teacher's).
        """
        prompt = self._rows(batch)
        context = torch.zeros(batch.size, dtype=torch.bool) if helped is None else helped
        ids = batch.response_ids
        logits = self.policy(
            prompt[:, None].expand_as(ids), previous_tokens(ids), context[:, None].expand_as(ids), theta
        )
        return logits / batch.temperature.to(logits.dtype).clamp(min=1e-6)[:, None, None]

    def _rows(self, batch: RolloutBatch) -> Tensor:
        """[B] the row of the tables for each prompt."""
        return torch.tensor([self.row[key] for key in batch.prompt_key])

    def teacher_logits(self, batch: RolloutBatch) -> Tensor:
        """[B,T,V] logits of the teacher, which sees each row's `teacher_context`."""
        helped = torch.tensor([bool(r.teacher_context) for r in batch.rollout])
        return self.logits(batch, self.teacher, helped)

    def logp(self, batch: RolloutBatch, logits: Tensor) -> Tensor:
        """[B,T] log-probabilities of the response tokens; NaN where a token is not the model's."""
        return token_logp(logits, batch.response_ids)

    @torch.no_grad()
    def signals(self, batch: RolloutBatch, wanted: frozenset[str]) -> RolloutBatch:
        """The batch with those of the host's computed columns that the parts require; logp_old always."""
        current = self.logits(batch)
        make: dict[str, Callable[[], Any]] = {
            "logp_old": lambda: self.logp(batch, current),
            "entropy": lambda: entropy(current),
            "logp_ref": lambda: self.logp(batch, self.logits(batch, self.reference)),
            "logp_prox": lambda: self.logp(batch, self.logits(batch, self.prox)),
            "logp_teacher": lambda: self.logp(batch, self.teacher_logits(batch)),
            "logp_behavior": lambda: torch.full_like(batch.logp_rollout, torch.nan),
            "correct": lambda: batch.rewards > 0.5,
            "values": lambda: self.critic(self._rows(batch), previous_tokens(batch.response_ids)),
        }
        make |= {name: partial(self._top, batch, part) for part, name in enumerate(TOP)}
        make |= {name: partial(self._dataset_column, batch, name) for name in self.columns("p0")}
        make |= {name: partial(self._field, batch, name) for name in self.fields}
        names = (wanted | {"logp_old"}) & set(make)
        return batch.with_columns(**{name: make[name]() for name in sorted(names) if not batch.has(name)})

    def _top(self, batch: RolloutBatch, part: int) -> Tensor:
        """[B,T,3] the engine's three most likely tokens (part 0) or their log-probs (1), NaN under older weights."""
        helped = torch.tensor([bool(r.context) for r in batch.rollout])
        logp, ids = self.logits(batch, self.engine.rounded, helped).log_softmax(-1).topk(3)
        now = batch.step - batch.staleness == self.engine.version
        return torch.where(now[..., None], logp, torch.nan) if part else ids

    def _dataset_column(self, batch: RolloutBatch, name: str) -> Tensor | list[Any]:
        """A column of the dataset, one entry per row: numbers as a tensor, anything else as a list."""
        return _column([self.columns(key).get(name) for key in batch.prompt_key])

    def _field(self, batch: RolloutBatch, name: str) -> Tensor | list[Any]:
        """A column of what the rollout code returned, one entry per row."""
        return _column([self.fields[name](r) for r in batch.rollout])

    def updated(self, version: int, sync: bool, reset_prox: bool = False) -> None:
        """After an update: the averaged policy moves, or starts anew, and the engine gets the weights if `sync`."""
        theta = self.policy.theta.detach()
        (self.average.reset if reset_prox else self.average.update)([theta])
        if sync:
            self.engine.load(theta, version)

    def fit_critic(self, batch: RolloutBatch) -> None:
        """Move the critic towards the column `returns` that an advantage estimator made."""
        previous = previous_tokens(batch.response_ids)
        self.critic.fit(self._rows(batch), previous, batch.returns, batch.response_mask)

    # ---- checkpoint
    def state_dict(self) -> dict[str, Any]:
        """What changes from step to step, as plain values and tensors."""
        engine = self.engine
        return {
            "theta": self.policy.theta.detach().clone(),
            "prox": self.average.state_dict(),
            "critic": self.critic.value.clone(),
            "engine": {"theta": engine.exact.clone(), "version": engine.version},
            "counters": {"ticks": engine.ticks, "generated": engine.generated},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        with torch.no_grad():
            self.policy.theta.copy_(saved["theta"])
        self.average.load_state_dict(saved["prox"])
        self.critic.value = saved["critic"].clone()
        self.engine.load(saved["engine"]["theta"], saved["engine"]["version"])
        self.engine.ticks, self.engine.generated = saved["counters"]["ticks"], saved["counters"]["generated"]


def _column(values: list[Any]) -> Tensor | list[Any]:
    """Numbers as a tensor, anything else as a list."""
    return torch.tensor(values) if all(isinstance(v, (int, float)) for v in values) else values
