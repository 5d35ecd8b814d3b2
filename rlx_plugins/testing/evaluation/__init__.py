"""Run a method on the canonical inputs of its paper's function form.

Each method's function form is a plain function in `evaluation/<kind>.py`, named after the method, whose arguments and
result names are those of the paper's mathematics. It calls the plug-in the hosts call; there is no second
implementation behind it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from ...core.errors import ConfigError, close_matches


def evaluate(
    kind: str, name: str, inputs: Mapping[str, Any], params: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Run method `name` of `kind` on nested lists or arrays; float64.

    inputs   argument name -> nested lists, arrays or tensors; None inside a list of numbers means NaN
    params   hyper-parameters by the method's own or the library's names
    returns  result name -> tensor or plain value: every quantity the function form names
    """
    arguments = {argument: _as_lists(value) for argument, value in {**inputs, **(params or {})}.items()}
    return dict(function_form(kind, name)(**arguments))


def _as_lists(value: Any) -> Any:
    """Arrays and tensors as nested lists, also inside lists: that is what the forms take."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_as_lists(v) for v in value] if isinstance(value, list) else value


def function_form(kind: str, name: str) -> Callable[..., Mapping[str, Any]]:
    """The function behind `evaluate` for one method; its signature lists the arguments and their defaults."""
    try:
        module = importlib.import_module(f"{__name__}.{kind}")
    except ModuleNotFoundError as error:
        raise ConfigError(f"no function forms for kind {kind!r}") from error
    forms: dict[str, Callable[..., Mapping[str, Any]]] = module.FORMS
    if name not in forms:
        raise ConfigError(f"no function form for {kind} {name!r}{close_matches(name, forms)}")
    return forms[name]
