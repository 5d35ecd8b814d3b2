"""States and actions of an agent's turns as values that can be compared between rollouts."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from ..core.errors import ConfigError
from ..core.trajectory import Rollout

Signatures = tuple[Sequence[Hashable], Sequence[Hashable]]
"""(state, action) signatures of a rollout's turns; the state is the one the action was taken in."""


def turn_signatures(rollout: Rollout) -> Signatures:
    """Action: the turn's own tokens. State: the set of (action, tool output) pairs so far, in any order."""
    states: list[Hashable] = []
    actions: list[Hashable] = []
    seen: frozenset[tuple[Any, Any]] = frozenset()
    turn: int | None = None
    own: tuple[int, ...] = ()
    result: tuple[int, ...] = ()
    for segment in rollout.segments:
        if not segment.from_model:
            result += tuple(segment.tokens)
            continue
        if segment.turn != turn:
            if turn is not None:
                seen |= {(own, result)}
            turn, own, result = segment.turn, (), ()
            states.append(seen)
            actions.append(own)
        own += tuple(segment.tokens)
        actions[-1] = own
    return states, actions


def signature_function(name: str) -> Callable[[Rollout], Signatures]:
    """`turn_signatures` for "turns", else the function at "module:function"."""
    if name == "turns":
        return turn_signatures
    module, sign, function = name.partition(":")
    try:
        if not sign:
            raise AttributeError(f"expected module:function, got {name!r}")
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"advantage rtmc.signatures: {error}") from error


def numbered(rows: Iterable[Iterable[Hashable] | None]) -> list[list[int]]:
    """Signatures as integers, equal ones alike."""
    numbers: dict[Hashable, int] = {}
    return [[_number(numbers, s) for s in (() if row is None else row)] for row in rows]


def _number(numbers: dict[Hashable, int], signature: Any) -> int:
    """The number of the signature, a new one where it has none."""
    try:
        return numbers.setdefault(signature, len(numbers))
    except TypeError:  # a list or a set somewhere inside
        return numbers.setdefault(_hashable(signature), len(numbers))


def _hashable(signature: Any) -> Hashable:
    """Lists and sets, as a dataset or JSON may hold them, in a form that can be compared."""
    if isinstance(signature, (list, tuple)):
        return tuple(map(_hashable, signature))
    if isinstance(signature, (set, frozenset)):
        return frozenset(map(_hashable, signature))
    return signature
