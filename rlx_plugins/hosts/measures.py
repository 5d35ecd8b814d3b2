"""What a scored batch says about the health of a run, and fingerprints that show whether two runs are matched."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.batch import RolloutBatch

SUCCESS = 0.5
"""A row without a `correct` column succeeded if its reward is above this."""

_SAMPLED = 4096
"""Elements of each weight that enter the fingerprint."""


@torch.no_grad()
def batch_measures(batch: RolloutBatch) -> dict[str, float]:
    """Numbers of one batch, for the logger; what the batch has no columns for is left out.

    groups/all_fail, groups/all_pass  share of groups without a success, without a failure
    groups/distinct         distinct responses per response, within groups
    tokens/effective        share of model tokens with a non-zero weight and advantage
    tokens/stale            share of model tokens that an earlier policy sampled
    staleness/mean, /max    policy versions between sampling and update
    length/p99_over_p50     quantiles of the response length, in tokens
    sampling/kl             mean of exp(d) - 1 - d, d = logp_old - logp_rollout: KL(rollout || trainer), nats per token
                            that the current policy sampled
    """
    mask, groups = batch.response_mask, batch.groups
    success = batch.correct.bool() if batch.has("correct") else batch.rewards > SUCCESS
    scorable = torch.isfinite(batch.rewards)
    rate = groups.mean(success.double(), scorable)[groups.count(success.double(), scorable) > 0]
    n_groups = max(1, len(rate))
    tokens = mask.sum().clamp(min=1).double()
    out = {
        "groups/all_fail": (rate == 0).sum() / n_groups,
        "groups/all_pass": (rate == 1).sum() / n_groups,
        "length/p99_over_p50": _tail(batch.lengths),
    }
    if batch.has("response_ids"):
        responses = _row_hashes(torch.where(mask, batch.response_ids, -1))
        distinct = torch.unique(torch.stack([batch.group, responses], 1), dim=0)
        out["groups/distinct"] = torch.tensor(len(distinct) / batch.size)
    if batch.has("advantages"):
        works = mask & (batch.advantages != 0)
        if batch.has("loss_weight"):
            works = works & (batch.loss_weight != 0)
        out["tokens/effective"] = works.sum() / tokens
    if batch.has("staleness"):
        stale = torch.where(mask, batch.staleness if batch.staleness.ndim > 1 else batch.staleness[:, None], 0)
        out["tokens/stale"] = (stale > 0).sum() / tokens
        out["staleness/mean"] = stale.sum() / tokens
        out["staleness/max"] = stale.max()
    if batch.has("logp_rollout") and batch.has("logp_old"):
        known = mask & torch.isfinite(batch.logp_rollout)
        if batch.has("staleness"):
            known = known & (stale == 0)  # an older policy differs for another reason
        if bool(known.any()):
            d = torch.where(known, batch.logp_old - batch.logp_rollout, 0).double()
            out["sampling/kl"] = (d.exp() - 1 - d).sum() / known.sum()
    return {name: float(value) for name, value in out.items()}


def update_tokens(batch: RolloutBatch) -> int:
    """Model tokens of a prepared batch that the policy loss gives a weight."""
    return int((batch.response_mask & (batch.loss_weight != 0)).sum())


def _tail(lengths: Tensor) -> Tensor:
    p50, p99 = torch.quantile(lengths.double(), torch.tensor([0.5, 0.99], dtype=torch.float64, device=lengths.device))
    return p99 / p50.clamp(min=1)


def _row_hashes(ids: Tensor) -> Tensor:
    """[B] int64: a hash of each row of [B,T] token ids (-1 = no token)."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (ids.shape[1],), generator=generator, dtype=torch.int64)
    return ((ids + 1) * factors.to(ids.device)).sum(1)


def shares(values: Sequence[Any]) -> dict[str, float]:
    """Share of each value, by name."""
    counts: dict[str, int] = {}
    for value in values:
        counts[str(value)] = counts.get(str(value), 0) + 1
    return {name: n / len(values) for name, n in sorted(counts.items())}


def prompts_hash(prompts: Iterable[Sequence[int]]) -> int:
    """A 48-bit number that is equal for equal sets of prompts (token ids), whatever their order and repetition."""
    digests = {hashlib.sha256(repr(list(prompt)).encode()).digest() for prompt in prompts}
    return int.from_bytes(hashlib.sha256(b"".join(sorted(digests))).digest()[:6], "big")


def weights_hash(model: nn.Module) -> str:
    """16 hex digits of a model's parameters: names, types, shapes, and up to 4096 elements of each, evenly spaced."""
    digest = hashlib.sha256()
    named: Mapping[str, Tensor] = dict(model.named_parameters())
    for name in sorted(named):
        values = named[name].detach().reshape(-1)
        chosen = values[:: -(-len(values) // _SAMPLED) or 1].float().cpu().numpy()
        digest.update(f"{name} {values.dtype} {tuple(named[name].shape)}".encode())
        digest.update(chosen.tobytes())
    return digest.hexdigest()[:16]


def checkpoint_hash(folder: Path) -> str | None:
    """16 hex digits of a checkpoint's safetensors: names, sizes, and 64 evenly spaced KiB of each; None without any."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as f:
            for at in range(0, size, max(1024, size // 64)):
                f.seek(at)
                digest.update(f.read(1024))
    return digest.hexdigest()[:16] if files else None
