"""Checks of every kind: documentation, shapes, parameters, what is declared, inputs left alone, repeatability."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import torch
from torch import Tensor

from ...core.batch import RolloutBatch
from ...core.errors import ConfigError, MissingSignal
from ...core.params import param_fields
from ...core.returned import COLUMNS
from .comparing import difference, first_difference
from .report import Failed, Skipped
from .setting import NO_NETWORK
from .subject import Subject

SOURCE = re.compile(r"arxiv|doi\.org|https?://|\b(TRL|verl)\b", re.IGNORECASE)
"""What in a docstring names a source where there is no `paper`."""


def documented(subject: Subject) -> None:
    """The docstring says what it computes, every parameter its meaning, and a source is named."""
    cls = type(subject.setting.part())
    text = inspect.getdoc(cls) or ""
    generated = text.startswith(f"{cls.__name__}(")  # what @dataclass writes where there is none
    if not text or generated:
        raise Failed("a docstring that says what is computed", "none", f"write one below `class {cls.__name__}`")
    for name, field in param_fields(cls).items():
        if not field.metadata.get("doc") and not re.search(rf"\b{name}\b", text):
            raise Failed(
                f"a meaning of the parameter {name!r} and where its default comes from",
                "neither a doc= nor a mention in the docstring",
                f'{name}: ... = rlx.param(..., doc="what it is; whose default")',
            )
    if not cls.paper and not SOURCE.search(text):
        raise Failed(
            "a paper or source", "no `paper`, and no link or host in the docstring", 'paper = "Title, arXiv id"'
        )


def shapes(subject: Subject) -> None:
    """The results are what its kind promises, in the shapes promised."""
    for hook in subject.hooks_or_skip():
        batch, part = subject.sample(hook, fresh=True), subject.setting.part()
        values = subject.call(hook, batch, part).values
        sizes = dict(zip("BT", batch.response_mask.shape))
        if hook.in_loss:
            wanted = {"result": "BT", **{name: "" for name in values if name != "result"}}
        elif hook.name == "mask":
            wanted = {"mask": "BT"}
        else:
            wanted = dict(COLUMNS["aggregate" if hook.name == "aggregate" else subject.kind])
        if subject.kind == "selector" and not part.cuts_rows:
            wanted.pop("kept_length")
        if subject.kind == "reward":
            wanted = {name: shape for name, shape in wanted.items() if name in values} or wanted
        for name, dims in wanted.items():
            shape = tuple(sizes[d] for d in dims if d in sizes)
            found = values.get(name)
            if isinstance(found, Tensor) and found.ndim == len(dims) and tuple(found.shape[: len(shape)]) == shape:
                continue
            has = f"one of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
            raise Failed(
                f"{name}: a tensor [{','.join(dims)}] of shape {shape}"
                if dims
                else f"{name}: a tensor with one number",
                f"{hook.name} returns {has}",
                "batch.spread(x) brings a value per row to its tokens; core/kinds.py shows what each kind returns",
            )


def parameters_fixed(subject: Subject) -> None:
    """Parameters are what they were after a run, and can't be assigned."""
    part = subject.setting.part()
    if not part.params():
        raise Skipped("it has no parameters")
    if subject.kind not in NO_NETWORK and subject.kind != "method":
        used = subject.setting.own(subject.run.parts)
        if (found := difference(used.params(), part.params())) is not None:
            raise Failed(
                "the parameters it was made with",
                f"after a run params(){found}",
                "keep what changes in a state() field",
            )
    name = next(iter(part.params()))
    try:
        setattr(part, name, getattr(part, name))
    except ConfigError:
        return
    raise Failed(f"an error when {name!r} is assigned", "it was assigned", "leave __setattr__ to the base class")


def declared(subject: Subject) -> None:
    """It reads no column beyond those of every batch and its `requires`, and makes those of its `provides`."""
    for hook in subject.hooks_or_skip():
        part, batch = subject.part(), subject.sample(hook)
        try:
            outcome = subject.call(hook, batch, part, declared_only=True)
        except MissingSignal as missing:
            column = re.search(r"no column ('\w+')", str(missing))
            raise Failed(
                "only columns named in `requires`",
                f"{hook.name} reads {column[1] if column else missing}",
                "name it in `requires`, or ask batch.has() where it is optional",
            ) from missing
        if hook.in_loss:
            continue
        absent = sorted(frozenset(part.provides) - set(outcome.values) - set(batch)) if hook.name == "__call__" else []
        if absent:
            raise Failed(
                f"the columns {sorted(part.provides)} it says it provides",
                f"{', '.join(absent)} was not returned",
                "return it beside the others, or leave it out of `provides`",
            )


def inputs_untouched(subject: Subject) -> None:
    """No column of the batch is changed in place."""
    for hook in subject.hooks_or_skip():
        batch = RolloutBatch({name: copy.deepcopy(column) for name, column in subject.sample(hook).items()})
        kept = {name: copy.deepcopy(_plain(column)) for name, column in batch.items()}
        subject.call(hook, batch, in_place=True)
        for name, before in kept.items():
            if (found := difference(_plain(batch[name]), before, tolerance=0.0)) is not None:
                where = f"{name.removeprefix('loss:')}{found}"
                raise Failed(
                    "the batch as it was", where, "make a new tensor; avoid methods that end in _ and x[...] ="
                )


def repeatable(subject: Subject) -> None:
    """The same inputs and the same state give the same bits, whatever the global generators would draw."""
    for hook in subject.hooks_or_skip():
        batch = subject.sample(hook)
        first, again = subject.call(hook, batch), subject.call(hook, batch, seed=1)
        everywhere = torch.ones_like(batch.response_mask)
        if (found := first_difference(again, first, everywhere, tolerance=0.0)) is not None:
            raise Failed(
                "the same result twice",
                f"the second call of {hook.name} has {found}",
                'draw with batch.uniform("name/draw"), and keep what changes in a state() field',
            )


def _plain(column: Any) -> Any:
    """A column as plain values, so that equal ones compare as equal."""
    if isinstance(column, list):
        return [x.to_plain() if hasattr(x, "to_plain") else x for x in column]
    return column
