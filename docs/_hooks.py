"""mkdocs hooks: tables that come from the registry, so that they can't fall behind it."""

from __future__ import annotations

from typing import Any

from rlx_plugins.cli import default_text, first_sentence, hosts_of, needs, type_text
from rlx_plugins.core.kinds import KINDS
from rlx_plugins.core.params import field_types, param_fields
from rlx_plugins.core.registry import builtin_names, find


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Replace `<!-- methods -->` and `<!-- kinds -->` by what the registry says."""
    return markdown.replace("<!-- methods -->", methods()).replace("<!-- kinds -->", kinds())


def kinds() -> str:
    """One row per kind: its name, what it is, how many built-in plug-ins it has."""
    rows = ["| kind | what it decides | chain | built in |", "|---|---|---|---|"]
    for kind, protocol in KINDS.items():
        chain = "yes" if getattr(protocol, "chains", False) else ""
        rows.append(f"| `{kind}` | {cell(first_sentence(protocol))} | {chain} | {len(builtin_names(kind))} |")
    return "\n".join(rows)


def methods() -> str:
    """A section per kind: a table of its plug-ins, then each with its parameters."""
    out = []
    for kind in KINDS:
        names = sorted(builtin_names(kind))
        if not names:
            continue
        out += [f"## {kind}", "", "| name | what it does | needs | paper |", "|---|---|---|---|"]
        for name in names:
            cls = find(kind, name)
            wanted = ", ".join(f"`{n}`" for n in needs(cls))
            out.append(f"| [`{name}`](#{kind}-{name}) | {cell(first_sentence(cls))} | {wanted} | {cell(cls.paper)} |")
        out.append("")
        for name in names:
            out += entry(kind, name)
    return "\n".join(out)


def entry(kind: str, name: str) -> list[str]:
    """One method: docstring, parameters, hosts."""
    cls = find(kind, name)
    out = [f"### {kind} {name} {{ #{kind}-{name} }}", "", docstring(cls), ""]
    fields = param_fields(cls)
    if fields:
        hints = field_types(cls)
        out += ["| parameter | type | default | meaning |", "|---|---|---|---|"]
        for n, f in fields.items():
            doc = cell(str(f.metadata.get("doc", "")))
            out.append(f"| `{n}` | `{cell(type_text(hints[n]))}` | `{cell(default_text(f))}` | {doc} |")
        out.append("")
    return [*out, f"Hosts: {', '.join(hosts_of(cls))}.", ""]


def docstring(cls: type) -> str:
    """The class's docstring, as Markdown: indented formulas stay code blocks, the rest is text."""
    import inspect

    return inspect.getdoc(cls) or ""


def cell(text: str) -> str:
    """Text fit for a table cell."""
    return text.replace("|", "\\|").replace("\n", " ")
