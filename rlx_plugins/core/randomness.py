"""Reproducible randomness: a hash of seed, step, name and keys instead of a generator's position.

A draw does not depend on call order, is equal on every rank, and leaves nothing to checkpoint. By convention a name
begins with the plug-in's own: `ctx.uniform("hive/skip", prompt_key)`.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_MASK_53 = (1 << 53) - 1


def hash_bits(*keys: object) -> int:
    """64 bits (a signed int64) that depend on every key; the same in every process and on every machine."""
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def uniform(*keys: object) -> float:
    """A float in [0, 1) determined by `keys`."""
    return (hash_bits(*keys) & _MASK_53) / 2**53


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def row_uniform(row_id: Tensor, *keys: object) -> Tensor:
    """One float64 in [0, 1) per entry of `row_id` (int64), determined by the id and `keys`; on the ids' device.

    The splitmix64 finaliser over the row id and a hash of the keys: no loop over rows.
    """
    x = row_id + hash_bits(*keys)
    x = x + (-7046029254386353131)  # 0x9E3779B97F4A7C15 as a signed integer
    x = (x ^ _logical_shift(x, 30)) * (-4658895280553007687)  # 0xBF58476D1CE4E5B9
    x = (x ^ _logical_shift(x, 27)) * (-7723592293110705685)  # 0x94D049BB133111EB
    x = x ^ _logical_shift(x, 31)
    return _logical_shift(x, 11).to(torch.float64) / 2**53
