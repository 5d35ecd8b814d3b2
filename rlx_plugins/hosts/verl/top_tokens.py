"""The engine's likeliest tokens on their way from verl's rollout servers to the signal table.

A request asks for them with `logprobs=TOP_K`, vLLM's own parameter, in the place of verl's True. The answer's extra
fields hold them as arrays under `TOP`: ids and log-probs [n,TOP_K], and the n tokens they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import DataError
from ...core.trajectory import Top
from ..signals import top_columns, top_tokens

TOP = "rlx_top_tokens"
"""Entry of a request's and a row's extra fields."""

Reported = list[np.ndarray]
"""[ids [n,TOP_K] int32, log-probs [n,TOP_K] float32, tokens [n] int32]; without the tokens in a server's answer."""


def asked_for(sampling_params: Mapping[str, Any]) -> int:
    """How many tokens a request asks for; 0 where it wants the sampled token's log-prob, or none."""
    wanted = sampling_params.get("logprobs")
    return 0 if wanted is None or isinstance(wanted, bool) else int(wanted)


def reported(ids: Sequence[Sequence[int]], logp: Sequence[Sequence[float | None]]) -> Reported:
    """What a server answers: the first TOP_K entries at each token, likeliest first."""
    return [tensor.numpy() for tensor in top_tokens(ids, logp)]


def of_answer(output: Any) -> Top | None:
    """The likeliest tokens of a server's or client's answer as tensors; None where it has none."""
    found = output.extra_fields.get(TOP)
    return None if found is None else (torch.tensor(found[0]), torch.tensor(found[1]))


def of_request(output: Any) -> Reported:
    """What a server's answer to a request that asked reports, with the tokens it belongs to."""
    if output.token_ids and TOP not in output.extra_fields:
        raise DataError("the rollout server reported no likeliest tokens, although the request asked for them")
    tokens = np.asarray(output.token_ids, dtype=np.int32)
    return [*(output.extra_fields[TOP] if output.token_ids else reported([], [])), tokens]


def joined(requests: Sequence[Reported]) -> Reported:
    """What several requests for one response report together."""
    return [np.concatenate(arrays) for arrays in zip(*requests)]


def columns_of_rows(
    extra: Sequence[Mapping[str, Any]], responses: Tensor, lengths: Sequence[int], where: Callable[[int], str]
) -> dict[str, Tensor]:
    """`rollout_top_ids`, `rollout_top_logp` [B,T,TOP_K] of rows that verl's agent loops generated.

    extra      their extra fields; responses [B,T] and lengths: their tokens, which begin with those that were sampled
    """
    rows: list[Top] = []
    for i, (fields, n) in enumerate(zip(extra, lengths)):
        if TOP not in fields:
            raise DataError(f"{where(i)} has no likeliest tokens: its agent loop dropped the engine's extra_fields")
        ids, logp, tokens = (torch.tensor(array) for array in fields[TOP])
        n = min(n, len(tokens))
        if responses[i, :n].tolist() != tokens[:n].tolist():
            raise DataError(
                f"{where(i)}: its response is not what one request sampled; generate with single_turn_agent"
            )
        rows.append((ids[:n], logp[:n]))
    return top_columns(rows, responses.shape[1])


def without_arrays(extra: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Extra fields that need not travel on with the likeliest tokens, once those are columns."""
    return [{name: value for name, value in fields.items() if name != TOP} for fields in extra]
