"""mkdocs hooks: what a page says about plug-ins beyond prose comes from the registry, so that it can't fall behind.

The entry of a built-in is a section `## <name>` of docs/methods/<kind>.md: prose, then one marker line

    <!-- rlx: <kind> <name> [<word> ...][, verl flag] -->

which becomes its command lines, facts and parameters. The words are added to the command lines: parameters that have no
default (`clip.penalty_coef=0.1`) and parts without which it does nothing (`advantage=lead`). A word of the entry's own
kind (`pruner=[copris_is,april]`) stands in place of `<kind>=<name>`. `verl flag`: verl's own flags can name it too.
tests/test_documentation.py checks all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlx_plugins.cli.descriptions import (
    default_instance_value,
    default_text,
    first_sentence,
    hosts_of,
    parts_of,
    type_text,
)
from rlx_plugins.core.config import parse_overrides, specs
from rlx_plugins.core.host import BATCH_SIGNALS, CAPABILITIES, HostProfile
from rlx_plugins.core.kinds import KINDS, Plugin
from rlx_plugins.core.params import field_types, param_fields
from rlx_plugins.core.registry import builtin_names, create, find
from rlx_plugins.core.state import state_fields
from rlx_plugins.hosts.inspection import HOSTS
from rlx_plugins.hosts.trl import profile as trl
from rlx_plugins.hosts.verl import profile as verl

MARKER = re.compile(r"<!-- rlx: (\w+) (\w+)((?: [^\s,]+=\S+?)*)(, verl flag)? -->")
POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"


@dataclass(frozen=True)
class Entry:
    """What a marker says. `words` are those of its command lines, `flag` whether verl's own flags can name it."""

    kind: str
    name: str
    words: tuple[str, ...]
    flag: bool

    @property
    def plugins(self) -> list[Any]:
        """All plug-ins its command lines create."""
        named = [(kind, spec) for kind, value in parse_overrides(self.words).items() for spec in specs(kind, value)]
        return [create(kind, spec.pop("name"), **spec) for kind, spec in named]

    @property
    def plugin(self) -> Any:
        """The one the entry is about."""
        [plugin] = [p for p in self.plugins if (p.kind, p.name) == (self.kind, self.name)]
        return plugin

    def commands(self) -> list[tuple[str, str]]:
        """(words of a command line, what they are for), for every host that can run it."""
        hosts, words = [hosts_of(p) for p in self.plugins], " ".join(self.words)
        lines = []
        if all("trl" in able for able in hosts):
            lines.append((f'--plugins "{words}"', "TRL"))
        if all("verl" in able for able in hosts):
            lines.append((f"""'rlx.plugins="{words}"'""", "verl"))
        if self.flag:
            lines.append((self.verl_flag(), "verl, by its own flags"))
        return lines

    def verl_flag(self) -> str:
        """verl's own flags for an advantage or a clip."""
        own = [word.removeprefix(f"{self.kind}.") for word in self.words if word.startswith(f"{self.kind}.")]
        if self.kind == "advantage":
            return " ".join([f"algorithm.adv_estimator=rlx.{self.name}", *(f"+algorithm.rlx.{p}" for p in own)])
        typed = [f"{POLICY_LOSS}._target_=rlx_plugins.hosts.verl.flags.RLXPolicyLossConfig"] if own else []
        return " ".join(
            [f"{POLICY_LOSS}.loss_mode=rlx.{self.name}", *typed, *(f"+{POLICY_LOSS}.params.{p}" for p in own)]
        )


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Replace the markers of entries, `<!-- methods -->` and `<!-- kinds -->` by what the registry says."""
    if page.file.src_uri.startswith("methods/"):
        markdown = with_entries(markdown)
    return markdown.replace("<!-- methods -->", methods()).replace("<!-- kinds -->", kinds())


def with_entries(markdown: str) -> str:
    """The text of a page of docs/methods with its markers expanded."""
    markdown = MARKER.sub(lambda found: expanded(read(found)), markdown)
    if (wrong := re.search(r"<!-- rlx.*", markdown)) is not None:
        raise ValueError(f"not the marker of an entry (see docs/_hooks.py): {wrong[0]}")
    return markdown


def entries(markdown: str) -> Iterator[Entry]:
    """The entries of a page, in order."""
    return map(read, MARKER.finditer(markdown))


def read(found: re.Match[str]) -> Entry:
    kind, name, extra, flag = found.groups()
    words = extra.split()
    if not any(word.startswith(f"{kind}=") for word in words):
        words.insert(0, f"{kind}={name}")
    return Entry(kind, name, tuple(words), flag is not None)


def expanded(entry: Entry) -> str:
    """Command lines, facts, what the hosts have to be told, parameters."""
    plugin = entry.plugin
    return "\n\n".join(filter(None, [commands(entry), facts(plugin), needs_table(plugin), parameters(plugin)]))


def commands(entry: Entry) -> str:
    lines = entry.commands()
    if not lines:
        return "With its default parameters only the [simulated host](../hosts.md#the-table-host) can run it."
    shown = [part for words, host in lines for part in (f"# {host}", words)]
    return "\n".join(["```bash", *shown, "```"])


def facts(plugin: Any) -> str:
    """A table of two columns, without the rows that have nothing to say."""
    parts = parts_of(plugin)
    state = [code(f if len(parts) == 1 else f"{p.kind}: {f}") for p in parts for f in state_fields(p)]
    rows = {
        "Paper": re.sub(r"arXiv (\d{4}\.\d{5})", r"[\g<0>](https://arxiv.org/abs/\1)", plugin.paper),
        "Hosts": ", ".join(hosts_of(plugin)),
        "Stands for": ", ".join(map(part_text, parts)) if plugin.kind == "method" else "",
        "Makes": code(*sorted(default_instance_value(plugin, "provides"))),
        "Decides": ", ".join(fixed_text(kind, name) for p in parts for kind, name in p.fixes.items()),
        "Reads as text": code(*sorted({c for p in parts for c in getattr(p, "token_columns", ())})),
        "Scope": "" if plugin.kind == "method" else code(plugin.scope),
        "State": ", ".join(state) + ", saved with the checkpoint" if state else "none",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {label} | {cell(text)} |" for label, text in rows.items() if text)])


def part_text(part: Plugin) -> str:
    """A part of a method: a link to its entry, and the parameters in which it differs from its defaults."""
    changed = [
        f"{n}={value}" for n, value in part.params().items() if str(value) != default_text(param_fields(part)[n])
    ]
    link = f"[`{part.kind} {part.name}`]({part.kind}.md#{part.name})"
    return f"{link} ({code(*changed)})" if changed else link


def fixed_text(kind: str, name: str | None) -> str:
    return f"does the work of a {kind} itself" if name is None else code(f"{kind}={name}")


def needs_table(plugin: Any) -> str:
    """What it needs beyond what every batch has, and for each host whether that is there or what supplies it."""
    alike: dict[tuple[str, str], list[str]] = {}
    for s in sorted(default_instance_value(plugin, "requires") - BATCH_SIGNALS):
        alike.setdefault((supply(TRL, s), supply(VERL, s)), []).append(s)
    rows = [f"| {code(*names)} | {on_trl} | {on_verl} |" for (on_trl, on_verl), names in alike.items()]
    for c in sorted(default_instance_value(plugin, "capabilities")):
        rows.append(f"| `{c}` ({CAPABILITIES[c]}) | {ability(TRL, c)} | {ability(VERL, c)} |")
    return "\n".join(["| needs | TRL | verl |", "|---|---|---|", *rows]) if rows else ""


def supply(host: HostProfile, signal: str) -> str:
    return "yes" if signal in host.signals else cell(host.remedy(signal))


def ability(host: HostProfile, capability: str) -> str:
    if capability in host.capabilities:
        return "yes"
    told = host.remedies.get(capability, "")
    return cell(told if capability in HOSTS[host.name].capabilities() else f"no{told and ': '}{told}")


class TRLDefaults:
    """TRL's options where none is set."""

    beta = 0.0

    def __getattr__(self, name: str) -> None:
        return None


class VerlDefaults(dict[str, Any]):
    """verl's options where none is set but those given."""

    def __missing__(self, name: str) -> VerlDefaults:
        return VerlDefaults()


TRL = trl.host_profile(TRLDefaults(), dataset=[])
VERL = verl.host_profile(
    VerlDefaults(actor_rollout_ref=VerlDefaults(rollout=VerlDefaults(calculate_log_probs=True))), verl.SYNC
)
"""The hosts with their own defaults."""


def parameters(plugin: Any) -> str:
    """Name, type, default and meaning of every parameter."""
    fields, hints = param_fields(plugin), field_types(type(plugin))
    rows = ["| parameter | type | default | meaning |", "|---|---|---|---|"]
    for name, f in fields.items():
        doc = cell(str(f.metadata.get("doc", "")))
        rows.append(f"| `{name}` | `{type_text(hints[name])}` | `{default_text(f)}` | {doc} |")
    return "\n".join(rows) if fields else "No parameters."


def kinds() -> str:
    """One row per kind: its name, what it is, how many built-in plug-ins it has."""
    rows = ["| kind | what it decides | chain | built in |", "|---|---|---|---|"]
    for kind, protocol in KINDS.items():
        chain = "yes" if getattr(protocol, "chains", False) else ""
        count = len(builtin_names(kind))
        name = f"[`{kind}`](methods/{kind}.md)" if count else f"`{kind}`"
        rows.append(f"| {name} | {cell(first_sentence(protocol))} | {chain} | {count} |")
    return "\n".join(rows)


def methods() -> str:
    """A section per kind with a table of its built-in plug-ins."""
    out = []
    for kind in KINDS:
        names = sorted(builtin_names(kind))
        if names:
            out += [f"## {kind}", "", f"[What the kind decides, and every entry]({kind}.md).", ""]
            out += ["| name | what it does | hosts | paper |", "|---|---|---|---|"]
            for name in names:
                cls = find(kind, name)
                texts = (f"[`{name}`]({kind}.md#{name})", first_sentence(cls), ", ".join(hosts_of(cls)), cls.paper)
                out.append(f"| {' | '.join(map(cell, texts))} |")
            out.append("")
    return "\n".join(out)


def code(*words: str) -> str:
    return ", ".join(f"`{word}`" for word in words)


def cell(text: str) -> str:
    """Text fit for a table cell; inside backticks a `|` needs no care."""
    return text.replace("|", "\\|").replace("\n", " ")
