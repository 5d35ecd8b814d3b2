"""A frozen value model beside the trainer: what it expects of each response, before every token of it.

`value_model` names a model with one value per token (its path or hub name: a token or sequence classifier with one
label, such as verl's critics and TRL's reward models) that reads the policy's tokens, or "package.module:function". It
supplies `values` [B,T], the expected return before each response token, and `value_prior` [B], that before the first.

Nothing here trains it. A method whose paper trains its critic (SAO) gets that on verl, from verl's own critic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.config import Parts
from ..core.errors import ConfigError, DataError
from ..recipes.task import load_object
from .signals import PRIOR

Tokens = Sequence[Sequence[int]]
ValueFunction = Callable[[Tokens, Tokens, Sequence[Sequence[bool]]], Any]
"""Of prompts, responses (token ids) and masks (which response tokens are the policy's): a value before each response
token of each row, as lists or tensors."""

SEQUENCES = "AutoModelForSequenceClassification"
_HEADS = {"ForTokenClassification": "AutoModelForTokenClassification", "ForSequenceClassification": SEQUENCES}


def check_value_model(name: Any) -> None:
    """Refuse a `value_model` that is no function and no model with one value per token. Loads no weights."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"value_model: expected a model's path or package.module:function, got {name!r}")
    if _is_function(name):
        if not callable(load_object(name, "value_model")):
            raise ConfigError(f"value_model {name!r} is no function")
        return
    _head(name)


def load_value_model(
    name: str, *, vocabulary: int, device: torch.device | str, dtype: torch.dtype | None = None, batch_size: int = 8
) -> ValueFunction:
    """The function `name` stands for, or its model on `device`, which scores `batch_size` rows at a time.

    vocabulary   tokens the policy has: the model must know as many
    """
    if _is_function(name):
        function: ValueFunction = load_object(name, "value_model")
        return function
    return ScalarModel(name, vocabulary=vocabulary, device=device, dtype=dtype, batch_size=batch_size)


def value_columns(function: ValueFunction, prompts: Tokens, responses: Tokens, masks: Tensor) -> dict[str, Tensor]:
    """`values` [B,T], NaN behind the end of a response, and `value_prior` [B], NaN for an empty one.

    masks [B,T] bool: response_mask. DataError names a row with another number of values than tokens.
    """
    rows = [[bool(x) for x in mask[: len(ids)]] for mask, ids in zip(masks.tolist(), responses)]
    given = function(prompts, responses, rows)
    if len(given) != len(prompts):
        raise DataError(f"value_model returned {len(given)} rows for {len(prompts)}")
    values = torch.full(masks.shape, torch.nan)
    for i, (row, ids) in enumerate(zip(given, responses)):
        found = torch.as_tensor(row, dtype=torch.float32).cpu()
        if found.shape != (len(ids),):
            raise DataError(
                f"value_model returned values of shape {list(found.shape)} for row {i}, whose response has"
                f" {len(ids)} tokens; it returns one before each response token"
            )
        values[i, : len(ids)] = found
    values = values.to(masks.device)
    return {"values": values, PRIOR: values[:, 0]}


class Priors:
    """`value_prior` of prompts whose rollouts are still to be made, for parts that plan them; asked for once each."""

    def __init__(self, function: ValueFunction, token: int):
        self.function, self.token = function, token
        self.known: dict[str, float] = {}

    @classmethod
    def wanted(cls, parts: Parts, function: ValueFunction | None, token: int) -> Priors | None:
        """None where no part of the rollout side reads the prior, or no value model supplies it."""
        asked = any(PRIOR in part.requires for part in parts.rollout)
        return cls(function, token) if asked and function is not None else None

    def of(self, key: str, prompt: Sequence[int]) -> float:
        """The prior of the prompt named `key`: the value before a response, whichever `token` it begins with."""
        if key not in self.known:
            mask = torch.ones(1, 1, dtype=torch.bool)
            self.known[key] = float(value_columns(self.function, [prompt], [[self.token]], mask)[PRIOR])
        return self.known[key]


class ScalarModel:
    """A model of transformers with one value per token, evaluated without gradient on rows of similar length."""

    def __init__(
        self,
        path: str,
        *,
        vocabulary: int,
        device: torch.device | str,
        dtype: torch.dtype | None = None,
        batch_size: int = 8,
    ):
        import transformers

        head = _head(path)
        model = getattr(transformers, head).from_pretrained(path, dtype=dtype)
        known = model.get_input_embeddings().num_embeddings
        if known < vocabulary:
            raise ConfigError(
                f"value_model {path} knows {known} tokens, the policy {vocabulary}: it must read the policy's tokens"
            )
        self.of_sequences = head == SEQUENCES
        if self.of_sequences and not hasattr(model, "score"):
            raise ConfigError(f"value_model {path}: {type(model).__name__} has no head `score` to apply to every token")
        self.model = model.eval().requires_grad_(False).to(device)
        self.batch_size = batch_size

    @torch.no_grad()
    def __call__(self, prompts: Tokens, responses: Tokens, masks: Sequence[Sequence[bool]]) -> list[Tensor]:
        out: list[Tensor] = [torch.empty(0)] * len(prompts)
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(responses[i]))
        for start in range(0, len(by_length), self.batch_size):
            rows = by_length[start : start + self.batch_size]
            values = self._values([[*prompts[i], *responses[i]] for i in rows])
            for i, row in zip(rows, values):
                first = len(prompts[i]) - 1
                out[i] = row[first : first + len(responses[i])]
        return out

    def _values(self, rows: list[list[int]]) -> Tensor:
        """[b,L]: the value after each token of the sequences."""
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self.model.device)
        if self.of_sequences:
            hidden = self.model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
            return self.model.score(hidden)[..., 0].float()
        return self.model(input_ids=ids, attention_mask=mask).logits[..., 0].float()


def _is_function(name: str) -> bool:
    module, colon, function = name.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def _head(path: str) -> str:
    """The auto class of transformers that loads a model with its value head; ConfigError where it has none."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"value_model {path!r}: no model there: {error}") from error
    architectures = config.architectures or []
    for suffix, auto in _HEADS.items():
        if any(name.endswith(suffix) for name in architectures):
            if config.num_labels != 1:
                raise ConfigError(f"value_model {path!r} has {config.num_labels} labels; a value is one")
            return auto
    raise ConfigError(
        f"value_model {path!r} ({', '.join(architectures) or 'no architecture'}) has no value head; give a token or"
        " sequence classifier with one label"
    )
