"""Last-layer hidden states of the policy, taken in verl's training workers where the output head is called.

`policy_hidden` runs in the driver and sends each worker its rows; `last_states` runs in the workers (Ray's
`__ray_call__`). There the rows go through verl's ordinary inference pass, with a hook on the output head and a loss
function of ours. verl makes the micro-batches and puts their answers in order itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu

from ...core.errors import ConfigError
from .averaged import actor_of
from .columns import lengths, non_tensor

STATES = "rlx_last_states"
"""Entry of verl's model output: nested [B, H], every row with H entries."""


def policy_hidden(group: Any, rows: Sequence[list[int]], *, multiple: int) -> list[Tensor]:
    """Per row the policy's last-layer state [H] at its last token, float32 on the CPU; no gradient.

    group     verl's worker group of the actor, each worker a data-parallel rank
    rows      token ids, one at least
    multiple  rows are padded to a multiple of it, which the number of workers divides
    """
    full = [*rows, *[rows[0]] * (-len(rows) % multiple)]
    share = len(full) // len(group.workers)
    asked = [
        worker.__ray_call__.remote(last_states, full[i * share : (i + 1) * share])
        for i, worker in enumerate(group.workers)
    ]
    return list(torch.cat(ray.get(asked)))[: len(rows)]


def last_states(worker: Any, rows: Sequence[list[int]]) -> Tensor:
    """[N,H] float32: the state at the last token of each row of this worker, in the order of the rows."""
    training = actor_of(worker).actor
    with answering_states(training):
        output = training.infer_batch(sequences(rows))
    return output[STATES].values().reshape(len(rows), -1)


def sequences(rows: Sequence[list[int]]) -> TensorDict:
    """Token rows in the form of verl's inference pass: no log-probs, but the loss function is called."""
    fields = {
        "input_ids": [torch.tensor(row) for row in rows],
        "position_ids": [torch.arange(len(row)) for row in rows],
        "loss_mask": [torch.ones(len(row)) for row in rows],
    }
    nested = {name: torch.nested.as_nested_tensor(field, layout=torch.jagged) for name, field in fields.items()}
    data = TensorDict(nested, batch_size=len(rows))
    tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=True, distillation_only=True, temperature=1.0)
    return data


@contextmanager
def answering_states(training: Any) -> Iterator[None]:
    """verl's training worker answers with last-layer states inside; its model and loss function are as before after."""
    states, own = LastStates(), training.loss_fn
    hook = output_head(training.engine.module).register_forward_pre_hook(states.note)
    training.loss_fn = states
    try:
        yield
    finally:
        hook.remove()
        training.loss_fn = own


class LastStates:
    """A hook of the output head, and the loss function that makes its input an entry of verl's model output.

    What the head is called with is held for one micro-batch, as long as its logits are.
    """

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []

    def note(self, head: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """Forward pre-hook: remember the hidden states of this micro-batch."""
        self.inputs += arguments

    def __call__(self, model_output: dict[str, Any], data: TensorDict, dp_group: Any = None) -> tuple[Tensor, dict]:
        """A loss of 0; adds the states at the rows' last tokens to `model_output`."""
        if len(self.inputs) != 1:
            raise ConfigError(
                f"hidden states can't be read: the model's output head was called {len(self.inputs)} times in a forward"
                " pass, not once; verl runs this model with a forward of its own (fused kernels or several heads)"
            )
        states = self.inputs.pop()
        last = states[last_positions(data)].float()
        offsets = torch.arange(len(last) + 1, device=last.device) * last.shape[1]
        model_output[STATES] = torch.nested.nested_tensor_from_jagged(last.flatten(), offsets)
        return torch.zeros((), device=last.device), {}


def last_positions(data: TensorDict) -> tuple[Tensor, Tensor]:
    """Row and place of each sequence's last token in the model's input: one packed row, or rows padded on the right."""
    sizes = lengths(data["input_ids"])
    if non_tensor(data, "use_remove_padding"):
        return torch.zeros_like(sizes), sizes.cumsum(0) - 1
    return torch.arange(len(sizes), device=sizes.device), sizes - 1


def output_head(module: nn.Module) -> nn.Module:
    """The layer that makes logits of hidden states; refuses a model without one."""
    named = getattr(module, "get_output_embeddings", None)
    head = named() if named is not None else None
    if not isinstance(head, nn.Module):
        raise ConfigError(
            f"hidden states can't be read from {type(module).__name__}: its get_output_embeddings() gives no output"
            " head; leave out the plug-in that reads them, or train a causal language model of transformers"
        )
    return head
