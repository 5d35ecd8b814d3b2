"""One suite that every plug-in passes, ours and third parties'."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, close_matches
from ...core.kinds import KINDS, Plugin
from ...core.registry import find, names
from . import engine, general, invariance, loss, numerics, rewards, rollout
from .report import ConformanceError, Failed, Report, Skipped
from .setting import EXEMPT, Column, Setting, settings_of_builtins
from .subject import Subject

__all__ = ["CHECKS", "ConformanceError", "Report", "check_plugin", "settings_of_builtins"]

CHECKS: dict[str, Callable[[Subject], str | None]] = {
    check.__name__: check
    for check in (
        general.documented,
        general.shapes,
        rollout.trains,
        general.parameters_fixed,
        general.declared,
        general.inputs_untouched,
        general.repeatable,
        invariance.row_permutation,
        invariance.padding,
        invariance.masked_garbage,
        numerics.precision,
        numerics.device,
        rewards.group_of_one,
        rewards.equal_rewards,
        rewards.unscorable_rewards,
        loss.no_host_sync,
        loss.constants_detached,
        loss.gradient,
        rollout.trains_unscorable,
        rollout.repeats,
        rollout.resumes,
        rollout.within_max_tokens,
        rollout.loses_no_rollout,
        engine.drafts,
        engine.wraps_a_model,
    )
}
"""Name of every check -> the function whose docstring says what it looks for."""


def check_plugin(
    plugin: str | type[Plugin] | Plugin,
    name: str | None = None,
    /,
    *,
    columns: Mapping[str, Column] | None = None,
    beside: Mapping[str, Any] | None = None,
    exempt: Mapping[str, str] | None = None,
    **parameters: Any,
) -> Report:
    """Run every check on a registered plug-in; raises `ConformanceError` with all that fail.

        check_plugin("my.advantage")                      # a name; (kind, name) where two kinds have it
        check_plugin("clip", "my.rule", eps=0.2)          # with parameters
        check_plugin(MyPlugin(eps=0.2), columns={"gap": lambda batch: torch.rand(batch.response_mask.shape)})

    plugin   a name, a kind (then `name` is the plug-in's), a class, or an instance
    columns  column -> function of the batch that makes it, for signals of `requires` that users' data would supply
    beside   further plug-ins it works with, in the grammar of the configuration
    exempt   check -> why the plug-in need not pass it; an exempted check that passes is a failure
    """
    setting = _setting(plugin, name, parameters, columns=dict(columns or {}), beside=dict(beside or {}))
    known = {} if parameters or isinstance(plugin, Plugin) else EXEMPT.get((setting.kind, setting.name), {})
    return run_checks(setting, {**known, **(exempt or {})})


def run_checks(setting: Setting, exempt: Mapping[str, str]) -> Report:
    """The outcome of every check on the plug-in of `setting`; raises ConfigError where it can't be built."""
    if unknown := sorted(set(exempt) - set(CHECKS)):
        raise ConfigError(f"exempt: unknown check {unknown[0]!r}{close_matches(unknown[0], CHECKS)}")
    subject, report = Subject(setting), Report(setting.label)
    subject.build()
    broken = ""
    for check, look in CHECKS.items():
        if broken:
            report.skipped[check] = f"see {broken}"
            continue
        try:
            remark = look(subject) or ""
        except Skipped as reason:
            report.skipped[check] = str(reason)
        except Exception as error:  # a plug-in may raise anything
            if check in exempt:
                report.exempt[check] = exempt[check]
            else:
                report.failed[check] = error if isinstance(error, Failed) else _unexpected(error)
            if look is general.shapes or (look is rollout.trains and not isinstance(error, Failed)):
                broken = check  # the later checks would only say the same again
        else:
            if check in exempt:
                report.failed[check] = Failed("a reason to be exempt", "it passes", f"remove {check!r} from exempt")
            else:
                report.passed[check] = remark
    if report.failed:
        raise ConformanceError(report)
    return report


def _setting(
    plugin: str | type[Plugin] | Plugin, name: str | None, parameters: dict[str, Any], **given: Any
) -> Setting:
    if isinstance(plugin, str):
        kind, name = (plugin, name) if name is not None else _only_kind(plugin)
        find(kind, name)
        return Setting.of(kind, name, parameters, **given)
    cls = plugin if isinstance(plugin, type) else type(plugin)
    if name is not None or not issubclass(cls, Plugin):
        raise ConfigError(f"check_plugin: expected a name, a kind and a name, a class or an instance, got {plugin!r}")
    registered = hasattr(cls, "kind") and cls.name in names(cls.kind) and find(cls.kind, cls.name) is cls
    if not registered:
        raise ConfigError(f"check_plugin: {cls.__name__} is not registered; put @rlx.register(kind, name) above it")
    own = {} if isinstance(plugin, type) else plugin.params()
    return Setting.of(cls.kind, cls.name, {**own, **parameters}, **given)


def _only_kind(name: str) -> tuple[str, str]:
    kinds = [kind for kind in KINDS if name in names(kind)]
    if len(kinds) != 1:
        found = f"is a plug-in of kinds {', '.join(kinds)}" if kinds else "is no plug-in (rlx list)"
        raise ConfigError(f"check_plugin: {name!r} {found}; call check_plugin(kind, name)")
    return kinds[0], name


def _unexpected(error: Exception) -> Failed:
    """A failure that names the error and the innermost line of it outside torch."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    text = str(error).splitlines()[0] if str(error) else ""
    seen = f"{type(error).__name__}: {text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    return Failed("no error", seen, "call this hook alone and read the traceback")
