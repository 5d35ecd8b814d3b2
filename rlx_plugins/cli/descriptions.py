"""What a plug-in is, in words: for the command line and the documentation."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from ..core.config import OPTIONS, specs
from ..core.kinds import ALIASES, Method, Plugin
from ..core.params import param_fields
from ..core.registry import create

FULL_LINE = 112
"""A docstring's line that the next word would make longer than this was wrapped there."""


def first_sentence(cls: type) -> str:
    """The first sentence of a class's docstring."""
    text = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".")


def unwrapped(cls: type) -> str:
    """A class's docstring for a narrow screen: wrapped lines of prose joined, formulas and tables as they are."""
    out = ""
    before = ""
    for line in (inspect.getdoc(cls) or "").splitlines():
        prose = all(text and not text.startswith(" ") and " = " not in text for text in (before, line))
        wrapped = prose and len(f"{before} {line.split()[0]}") > FULL_LINE
        out += f" {line}" if wrapped else f"\n{line}"
        before = line
    return out.removeprefix("\n")


def default_instance_value(plugin: Plugin | type[Plugin], name: str) -> frozenset[str]:
    """`requires`, `provides` or `capabilities` of a plug-in, or of a class with its default parameters.

    A method's are those of the parts it stands for. Signals that it makes itself are not required.
    """
    if isinstance(plugin, type):
        if any(default_text(f) == "required" for f in param_fields(plugin).values()):
            value = getattr(plugin, name)
            return frozenset() if isinstance(value, property) else frozenset(value)
        plugin = plugin()
    parts = parts_of(plugin)
    values = frozenset[str]().union(*(getattr(part, name) for part in parts))
    return values.difference(*(part.provides for part in parts)) if name == "requires" else values


def parts_of(plugin: Plugin) -> list[Any]:
    """The plug-ins a method stands for; of any other kind, the plug-in itself."""
    if not isinstance(plugin, Method):
        return [plugin]
    expanded = {key: value for key, value in plugin.expand().items() if key not in OPTIONS}
    chosen = [(ALIASES.get(key, key), spec) for key, value in expanded.items() for spec in specs(key, value)]
    return [create(kind, spec.pop("name"), **spec) for kind, spec in chosen]


def needs(plugin: Plugin | type[Plugin]) -> list[str]:
    """Signals and capabilities a plug-in needs, a class with its default parameters."""
    return sorted(default_instance_value(plugin, "requires")) + sorted(default_instance_value(plugin, "capabilities"))


def hosts_of(plugin: Plugin | type[Plugin]) -> list[str]:
    """Hosts that can carry the plug-in in some configuration."""
    from ..hosts.inspection import HOSTS

    wanted = default_instance_value(plugin, "capabilities")
    missing = {name: sorted(wanted - host.capabilities()) for name, host in HOSTS.items()}
    return [name if not gaps else f"not {name} (lacks {', '.join(gaps)})" for name, gaps in missing.items()]


def type_text(t: Any) -> str:
    return inspect.formatannotation(t).replace("typing.", "")


def default_text(f: dataclasses.Field[Any]) -> str:
    if f.default is not dataclasses.MISSING:
        return str(f.default)
    return "required" if f.default_factory is dataclasses.MISSING else str(f.default_factory())
