"""The one grammar of a configuration, and the checks that refuse what can't run.

plugins:
  method: lead                             # several kinds at once
  advantage: dvao                          # a name
  clip: {name: bapo, target: 1.0}          # a name with parameters
  reward: [alp, {name: meds, window: 8}]   # a chain
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError, close_matches
from .host import BATCH_SIGNALS, HostProfile
from .kinds import ALIASES, DEFAULTS, KINDS, ROLLOUT_KINDS, Plugin
from .registry import create, implements

Spec = dict[str, Any]
"""A plug-in named in a configuration: {"name": ..., parameter: value, ...}."""

OPTIONS: dict[str, Any] = {"baseline": "kept", "distill_coef": 1.0}
"""Keys beside the kinds. baseline: do rows with keep=False count in the group's statistics ("all") or not ("kept")?
distill_coef: weight of the distillation term."""


@dataclass
class Parts:
    """The plug-ins of a run by kind, in the order of their chain: `parts["clip"]` is a list, `one("clip")` its one."""

    by_kind: dict[str, list[Any]]
    baseline: str = "kept"
    distill_coef: float = 1.0
    named: frozenset[str] = field(default_factory=frozenset)

    def __getitem__(self, kind: str) -> list[Any]:
        return self.by_kind.get(kind, [])

    def __iter__(self) -> Iterator[Any]:
        """All plug-ins, in the order the kinds meet a rollout."""
        for kind in (*KINDS, *ALIASES):
            yield from self[kind]

    def one(self, kind: str) -> Any:
        """The plug-in of a kind that takes one, or None."""
        chosen = self[kind]
        return chosen[0] if chosen else None

    def with_hook(self, hook: str) -> list[Any]:
        """The plug-ins that define `hook` themselves."""
        return [part for part in self if implements(part, hook)]

    @property
    def rollout(self) -> list[Any]:
        """The parts of the rollout program, in the order each hook visits them."""
        return [part for kind in ROLLOUT_KINDS for part in self[kind]]

    @property
    def requires(self) -> frozenset[str]:
        """Signals any part reads beyond those every batch carries."""
        return frozenset().union(*(part.requires for part in self)) - BATCH_SIGNALS

    def state_dict(self) -> dict[str, Any]:
        """State of every part, by "kind/position/name"."""
        return {key: part.state_dict() for key, part in self._keyed()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state of every part; refuses, changing nothing, when other plug-ins were saved."""
        mine = dict(self._keyed())
        if set(mine) != set(saved):
            raise ConfigError(
                f"the checkpoint was written with other plug-ins: it has {sorted(saved)}, this run has {sorted(mine)};"
                " resume with the plug-ins of the interrupted run"
            )
        before = self.state_dict()
        try:
            for key, part in mine.items():
                part.load_state_dict(saved[key])
        except ConfigError:
            for key, part in mine.items():
                part.load_state_dict(before[key])
            raise

    def _keyed(self) -> Iterator[tuple[str, Any]]:
        for kind in (*KINDS, *ALIASES):
            for i, part in enumerate(self[kind]):
                yield f"{kind}/{i}/{part.name}", part


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`["advantage=dvao", "clip=bapo", "clip.target=1.0", "reward=[alp,lead]"]` as a configuration.

    Values are read as YAML scalars and lists. A parameter of a chain's entry is given by position: `reward.0.window=8`.
    """
    config: dict[str, Any] = {}
    for word in words:
        key, sign, text = word.partition("=")
        if not sign or not key:
            raise ConfigError(f"expected key=value, got {word!r}")
        merge_override(config, key, read_value(text))
    return config


def merge_override(config: dict[str, Any], key: str, value: Any) -> None:
    """Set `kind=value` or `kind.parameter=value` (`kind.position.parameter` in a chain) in a configuration."""
    kind, *path = key.split(".")
    check_key(kind)
    if not path:
        config[kind] = value
        return
    if kind in OPTIONS:
        raise ConfigError(f"{key}: {kind} has no parameters")
    if kind not in config:
        raise ConfigError(f"{key}={value}: name the plug-in first ({kind}=NAME)")
    chosen = specs(kind, config[kind])
    position = 0
    if path[0].isdigit():
        position = int(path.pop(0))
    if len(path) != 1 or position >= len(chosen):
        raise ConfigError(f"{key}: expected {kind}.parameter, or {kind}.position.parameter within the chain")
    chosen[position][path[0]] = value
    config[kind] = chosen if len(chosen) > 1 else chosen[0]


def expand(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with its `method` replaced by the kinds it stands for; explicit keys win."""
    config = dict(config)
    for key in config:
        check_key(key)
    spec = config.pop("method", None)
    if spec is None:
        return config
    chosen = specs("method", spec)
    if len(chosen) != 1:
        raise ConfigError(f"method takes one name, got {spec!r}")
    parts = _create("method", chosen[0]).expand()
    if set(parts) <= set(config):
        raise ConfigError(
            f"method {chosen[0]['name']} stands for {' and '.join(parts)}, and each of them is named by a key of its"
            " own: it would do nothing; drop it, or the key"
        )
    return {**parts, **config}


def build(config: Mapping[str, Any], host: HostProfile) -> Parts:
    """The plug-ins a configuration names, checked against each other and against the host; defaults filled in.

    Raises ConfigError for an unknown kind, name or parameter, for parts that exclude each other, and for a signal or
    capability the host can't supply, naming the part and the remedy. Nothing is returned half-built.
    """
    expanded = expand(config)
    named = frozenset(expanded) - set(OPTIONS)
    options = {name: expanded.pop(name, default) for name, default in OPTIONS.items()}
    if options["baseline"] not in ("kept", "all"):
        raise ConfigError(f"baseline: expected 'kept' or 'all', got {options['baseline']!r}")
    coef = options["distill_coef"]
    if isinstance(coef, bool) or not isinstance(coef, (int, float)):
        raise ConfigError(f"distill_coef: expected a number, got {coef!r}")
    filled = {**DEFAULTS, **{k: v for k, v in expanded.items() if v is not None}}
    by_kind: dict[str, list[Any]] = {}
    for key, value in filled.items():
        chosen = specs(key, value)
        if len(chosen) > 1 and not KINDS[ALIASES.get(key, key)].chains:  # type: ignore[attr-defined]
            raise ConfigError(f"{key} takes one plug-in, got {', '.join(str(s.get('name')) for s in chosen)}")
        by_kind[key] = [_create(ALIASES.get(key, key), s) for s in chosen]
    parts = Parts(by_kind, options["baseline"], float(coef), named)
    check_together(parts)
    check_host(parts, host)
    return parts


def check_together(parts: Parts) -> None:
    """Refuse parts that exclude each other."""
    _check_fixed(parts)
    enders = [p for p in parts["pruner"] if p.ends_generation]
    if len(enders) > 1:
        raise ConfigError(f"{_names(enders)} both end generation early; choose one")
    planners = [p for kind in ("allocator", "hint") for p in parts[kind] if p.scope == "batch"]
    if enders and planners:
        raise ConfigError(
            f"{_label(planners[0])} ranks all groups of the step and so waits for every row,"
            f" but {_label(enders[0])} ends generation early; choose one"
        )
    weighing = [p for p in parts["correction"] if not p.masks_only]
    if len(weighing) > 1:
        raise ConfigError(f"{_names(weighing)} both weigh tokens for the same mismatch; keep one (masks may chain)")
    for p, divider in itertools.product(weighing, (*parts["ratio"], *parts["clip"])):
        if divider.denominator == p.corrects[1]:
            raise ConfigError(
                f"{_label(p)} corrects {p.corrects[0]} against {p.corrects[1]}, but {_label(divider)} already divides"
                f" by {p.corrects[1]}: the mismatch would count twice; use {divider.kind}.denominator=logp_old or drop"
                " the correction"
            )
    advantage = parts.one("advantage")
    for p in parts["reward"][-1:]:  # what earlier ones of the chain make, later ones may read
        if advantage is not None and advantage.credits not in p.shapes:
            shaped = " and ".join(sorted(p.shapes))
            raise ConfigError(
                f"{_label(p)} shapes {shaped}, but {_label(advantage)} reads {advantage.credits}: it would do nothing;"
                " choose another advantage, or another output of the reward if it has one"
            )
    cutters = [p for p in parts["selector"] if p.cuts_rows]
    whole = [p for kind in ("ratio", "clip") for p in parts[kind] if p.needs_full_rows]
    if cutters and whole:
        raise ConfigError(f"{_label(cutters[0])} cuts rows short, but {_label(whole[0])} needs full rows; choose one")
    for p in parts:
        p.check_beside(parts)


def check_host(parts: Parts, host: HostProfile) -> None:
    """Refuse parts that need a signal or capability which neither the host nor another part supplies."""
    provided = frozenset[str]().union(*(p.provides for p in parts))
    have = BATCH_SIGNALS | host.signals | provided
    for p in parts:
        for signal in sorted(frozenset(p.requires) - have):
            raise ConfigError(f"{_label(p)} needs the signal {signal!r}: {host.remedy(signal)}")
        for capability in sorted(frozenset(p.capabilities) - host.capabilities):
            raise ConfigError(
                f"{_label(p)} needs a host with the capability {capability!r}, which {host.name} lacks as configured:"
                f" {host.remedy(capability)}"
            )


def _check_fixed(parts: Parts) -> None:
    for p in parts:
        for kind, wanted in p.fixes.items():
            chosen = [q.name for q in parts[kind]] if kind in parts.named else []
            if wanted is None and chosen:
                raise ConfigError(f"{_label(p)} does the work of a {kind} itself; remove {kind}={chosen[0]}")
            if wanted is not None and chosen and chosen != [wanted]:
                raise ConfigError(f"{_label(p)} works with {kind}={wanted} only, got {kind}={chosen[0]}")
            if wanted is not None and not chosen:
                parts.by_kind[kind] = [create(kind, wanted)]


def check_key(key: str) -> None:
    known = [*KINDS, *ALIASES, *OPTIONS]
    if key not in known:
        raise ConfigError(f"unknown kind {key!r}{close_matches(key, known)} (accepted: {', '.join(known)})")


def specs(key: str, value: Any) -> list[Spec]:
    """A configuration value as a list of specs."""
    entries = list(value) if isinstance(value, (list, tuple)) else [value]
    found = []
    for entry in entries:
        if isinstance(entry, str):
            found.append({"name": entry})
        elif isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
            found.append(dict(entry))
        elif isinstance(entry, Plugin):
            found.append({"name": entry.name, **entry.params()})
        else:
            raise ConfigError(f"{key}: expected a name or {{name: ..., parameter: value}}, got {entry!r}")
    return found


def _create(kind: str, spec: Spec) -> Any:
    parameters = dict(spec)
    return create(kind, parameters.pop("name"), **parameters)


def read_value(text: str) -> Any:
    """A YAML-like scalar or flow list, without needing YAML: numbers, booleans, null, [a, [b, c]], else the text."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        inner = text[1:-1].strip()
        return [read_value(part) for part in _entries(inner)] if inner else []
    named = {"true": True, "false": False, "null": None, "none": None, "inf": float("inf")}
    if text.lower() in named:
        return named[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text.strip("'\"")


def _entries(text: str) -> list[str]:
    """The text cut at its commas, but not at those inside brackets."""
    depth, parts = 0, [""]
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _label(part: Any) -> str:
    return f"{part.kind} {part.name}"


def _names(parts: Sequence[Any]) -> str:
    return " and ".join(_label(p) for p in parts)


def describe(parts: Parts) -> dict[str, Any]:
    """The parts as a configuration with every parameter written out."""
    out: dict[str, Any] = {}
    for kind, chosen in parts.by_kind.items():
        written = [{"name": p.name, **p.params()} for p in chosen]
        out[kind] = written if len(written) > 1 else written[0] if written else None
    return out
