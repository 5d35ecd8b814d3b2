"""The loss of verl's actor: what its training workers call on every micro-batch instead of `ppo_loss`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ...core.batch import RolloutBatch
from ...core.config import Parts
from ...core.objective import POLICY, policy_loss, reduce
from ...core.terms import masked
from ..loss_terms import ENTROPY, count_columns, micro_terms, refuse_nan
from ..signals import TOP
from . import columns

LOGITS = "rlx_logits/"
"""Columns made of logits are entries `rlx_logits/<column>` of verl's model output."""

TOKENS_AT_A_TIME = 4096
"""Tokens whose probabilities of the whole vocabulary are in memory together."""

LOSS_KINDS = ("ratio", "clip", "distill", "auxiliary")
"""Kinds that live in the training workers; their state is the workers'."""


@dataclass(frozen=True)
class HostTerms:
    """verl's own terms that stay beside those of the plug-ins.

    kl_coef, kl_type   `actor.kl_loss_coef`, `actor.kl_loss_type`; 0 where `actor.use_kl_loss` is off
    entropy_coef       `actor.entropy_coeff`
    """

    kl_coef: float = 0.0
    kl_type: str = "low_var_kl"
    entropy_coef: float = 0.0


class ActorLoss:
    """verl's loss function (`ActorRolloutRefWorker.set_loss_fn`) for the plug-ins of a run.

    Called with the model's output and a micro-batch, it returns the loss and verl's metrics. Called with
    `student_logits` [1, nnz, V] (verl's logits processor), it returns what the parts make of them, [1, nnz] per column.
    A micro-batch that asks for `confidence` has a forward pass only, and gets that.

    The loss is sum(weight * token_loss) / total(count) over the optimizer step, times the number of data-parallel
    ranks, because FSDP averages gradients over them.
    """

    def __init__(self, parts: Parts, host_terms: HostTerms | None = None):
        self.parts = parts
        self.host_terms = host_terms or HostTerms()
        self._micro, self._counts = micro_terms(parts), count_columns(parts)

    def __call__(
        self,
        model_output: Mapping[str, Any] | None = None,
        data: TensorDict | None = None,
        dp_group: Any = None,
        student_logits: Tensor | None = None,
        data_format: str = "thd",
    ) -> Any:
        assert data is not None
        remember(self)
        if columns.ASKED in data.keys():
            if student_logits is not None:
                return {columns.CONFIDENCE: confidence(student_logits)}
            return torch.zeros((), device=data.device), {}
        if student_logits is not None:
            return self.from_logits(student_logits, data)
        assert model_output is not None
        return self.loss(model_output, data, dp_group)

    def loss(self, model_output: Mapping[str, Any], data: TensorDict, dp_group: Any) -> tuple[Tensor, dict[str, Any]]:
        """Loss (scalar, with gradient) and metrics of one micro-batch."""
        from verl.utils.metric import AggregationType, Metric
        from verl.workers.utils.padding import no_padding_2_padding

        batch = columns.micro_batch(data)
        self._take_state(data)
        logp_new = no_padding_2_padding(model_output["log_probs"], data)
        entropy = model_output.get("entropy")
        entropy = None if entropy is None else no_padding_2_padding(entropy, data)
        made = {
            name.removeprefix(LOGITS): no_padding_2_padding(value, data)
            for name, value in model_output.items()
            if name.startswith(LOGITS)
        }
        refuse_nan(logp_new, batch, batch.step)
        ranks = int(columns.non_tensor(data, "dp_size"))
        totals = self._totals(batch, data, ranks)
        loss, metrics = policy_loss(
            self.parts,
            batch,
            logp_new,
            totals=totals,
            entropy=entropy,
            logits=made or None,
            all_reduce=sum_over(dp_group),
        )
        summed = {"actor/pg_loss": loss.detach() * ranks}
        loss, terms = self._add_host_terms(loss, batch, logp_new, entropy, totals)
        summed |= {name: value.detach() * ranks for name, value in terms.items()}
        report = {name: Metric(AggregationType.SUM, value) for name, value in summed.items()}
        report |= {f"rlx/{name}": Metric(AggregationType.MEAN, value.detach()) for name, value in metrics.items()}
        return loss * ranks, report

    def _totals(self, batch: RolloutBatch, data: TensorDict, ranks: int) -> dict[str, Tensor]:
        """Totals of the optimizer step; for terms of micro scope, this micro-batch's own count times their number."""
        totals = columns.totals(data)
        if self._micro:
            rows = int(columns.non_tensor(data, "global_batch_size"))
            n = rows / int(columns.non_tensor(data, "micro_batch_size_per_gpu"))  # on all ranks together
            for term in self._micro:
                totals[term] = batch[self._counts[term]].sum() * n
        return totals

    def _add_host_terms(
        self,
        loss: Tensor,
        batch: RolloutBatch,
        logp_new: Tensor,
        entropy: Tensor | None,
        totals: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """verl's KL to the reference, weighted and counted like the policy loss, and its entropy bonus."""
        terms: dict[str, Tensor] = {}
        mask = batch.response_mask
        if batch.has("logp_ref") and self.host_terms.kl_coef != 0.0:
            from verl.trainer.ppo.core_algos import kl_penalty

            kl = kl_penalty(masked(logp_new, mask), masked(batch.logp_ref, mask), self.host_terms.kl_type)
            terms["actor/kl_loss"] = reduce(kl, batch.loss_weight, totals[POLICY])
            loss = loss + self.host_terms.kl_coef * terms["actor/kl_loss"]
        if entropy is not None:
            terms["actor/entropy_loss"] = reduce(entropy, mask.to(entropy.dtype), totals[ENTROPY])
            if self.host_terms.entropy_coef != 0.0:
                loss = loss - self.host_terms.entropy_coef * terms["actor/entropy_loss"]
        return loss, terms

    def _take_state(self, data: TensorDict) -> None:
        """The advantage was computed on the driver: its `in_loss` goes on from the driver's state."""
        state = columns.non_tensor(data, columns.RUN).get("advantage")
        if state is not None:
            self.parts.one("advantage").load_state_dict(state)

    def from_logits(self, logits: Tensor, data: TensorDict) -> dict[str, Tensor]:
        """What the parts make of the logits that predict response tokens, [1, nnz] per column, 0 elsewhere."""
        batch = columns.micro_batch(data)
        packed = logits[0]
        at = columns.response_positions(data)
        rows = columns.lengths(data["responses"])
        there = torch.arange(batch.response_mask.shape[1], device=rows.device)[None] < rows[:, None]
        tokens = {name: column[there] for name, column in batch.token_columns().items()}
        chosen = packed[at]
        out: dict[str, Tensor] = {}
        for part in self.parts.with_hook("from_logits"):
            for name, value in part.from_logits(chosen, tokens).items():
                full = value.new_zeros(len(packed))
                out[LOGITS + name] = full.index_put((at,), value)[None]
        return out


def confidence(logits: Tensor) -> Tensor:
    """[1, nnz] float32: the probability of the five likeliest tokens together, from logits [1, nnz, V]."""
    top = min(TOP, logits.shape[-1])
    parts = [x.float().softmax(-1).topk(top).values.sum(-1) for x in logits[0].split(TOKENS_AT_A_TIME)]
    return torch.cat(parts)[None]


def sum_over(group: Any) -> Callable[[Tensor], Tensor]:
    """A function that sums a tensor over the ranks of a process group (identity where there is none)."""

    def all_reduce(x: Tensor) -> Tensor:
        total = x.detach().clone()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(total, group=group)
        return total

    return all_reduce


_current: list[ActorLoss] = []


def remember(loss: ActorLoss) -> None:
    """Keep the loss of this worker process, so that the driver can ask for the state of its parts."""
    _current[:] = [loss]


def worker_state(worker: Any) -> dict[str, Any] | None:
    """State of the loss-phase parts in this worker process, by "kind/position/name"; None before the first update."""
    if not _current:
        return None
    return {key: state for key, state in _current[0].parts.state_dict().items() if key.split("/")[0] in LOSS_KINDS}
