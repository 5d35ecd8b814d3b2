"""Errors, written for the person who made the mistake: what was wrong, where, and what is accepted."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RLXError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(RLXError, ValueError):
    """A configuration that can't run: unknown name, bad parameter, missing signal, parts that exclude each other."""


class RegistrationError(RLXError, TypeError):
    """A plug-in class that does not fit the protocol of its kind."""


class DataError(RLXError, ValueError):
    """A batch that can't be trained on: an infinite reward, NaN log-probabilities under the mask, no scorable row."""


class MissingSignal(RLXError, AttributeError, KeyError):
    """A column was read that the batch does not carry."""

    def __str__(self) -> str:  # KeyError would quote the message
        return str(self.args[0]) if self.args else ""


def close_matches(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'bapo' or 'bapo2'?"` for the close matches of `name` among `known`, else an empty string."""
    near = difflib.get_close_matches(str(name), sorted(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
