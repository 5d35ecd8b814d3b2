"""A method's parameters, handed to the parts that have them."""

from __future__ import annotations

from typing import Any

from ..core.kinds import Method, Plugin
from ..core.params import param_fields


def spec(method: Method, part: type[Plugin], **fixed: Any) -> dict[str, Any]:
    """The configuration of one part: those of the method's parameters that it has, and the `fixed` ones."""
    own = method.params()
    return {"name": part.name, **{name: own[name] for name in param_fields(part) if name in own}, **fixed}
