"""Checks of groups and rewards at their edges: groups of one, equal rewards, rewards that could not be given."""

from __future__ import annotations

from typing import Any

import torch

from ...core.batch import RolloutBatch
from ...core.errors import DataError
from .comparing import difference
from .report import Failed, Skipped
from .subject import Hook, Subject, all_equal, some_unscorable

TRAINED_ON = ("rewards", "advantages", "weight", "count")
"""Returned columns that training goes on with: none may be NaN in a row that is trained."""


def group_of_one(subject: Subject) -> str:
    """Groups of one rollout give numbers."""
    remarks = []
    for hook in subject.hooks_or_skip(in_loss=False):
        batch = subject.sample(hook, alone=True)
        values = subject.call(hook, batch).values
        _check_numbers(hook, batch, values, "with groups of one rollout", "divide by std + eps, by count.clamp(min=1)")
        remarks.append(_remark(values))
    return "".join(remarks)


def equal_rewards(subject: Subject) -> str:
    """Groups whose rollouts all got the same give numbers."""
    remarks = []
    for hook in subject.hooks_or_skip(in_loss=False):
        batch, usual = subject.sample(hook, reward=all_equal), subject.sample(hook)
        values, before = subject.call(hook, batch).values, subject.call(hook, usual).values
        _check_numbers(hook, batch, values, "with equal rewards", "divide by std + eps", before)
        remarks.append(_remark(values))
    return "".join(remarks)


def unscorable_rewards(subject: Subject) -> str:
    """Rows whose reward is NaN are left out: no other group changes, and no NaN is trained on; or a DataError."""
    for hook in subject.hooks_or_skip(in_loss=False):
        batch, usual = subject.sample(hook, reward=some_unscorable), subject.sample(hook)
        lost = torch.isnan(batch.rewards)
        if not bool(lost.any()):
            raise Skipped("a plug-in before it makes the rewards anew")
        before = subject.call(hook, usual).values
        try:
            values = subject.call(hook, batch).values
        except DataError as refused:
            return f"refused: {refused}"
        hint = "use batch.groups, whose statistics leave NaN out"
        _check_numbers(hook, batch, values, "with unscorable rows", hint, before)
        if "advantages" in values and bool((values["advantages"][lost] != 0).any()):
            raise Failed(
                "advantage 0 for an unscorable row", f"{hook.name} gives another", "rlx.masked(x, isfinite(rewards))"
            )
        if subject.part().scope not in ("row", "group"):
            continue
        whole = ~torch.isin(batch.group, batch.group[lost])
        for name in [n for n in TRAINED_ON if n in values]:
            if (found := difference(values[name][whole], before[name][whole])) is not None:
                raise Failed(
                    "groups that do not depend on another's unscorable rows",
                    f"{hook.name} gives {name}{found}",
                    'take statistics over batch.groups, or declare scope = "batch"',
                )
    return ""


def _check_numbers(
    hook: Hook,
    batch: RolloutBatch,
    values: dict[str, Any],
    when: str,
    hint: str,
    before: dict[str, Any] | None = None,
) -> None:
    """Every trained column is finite on the model's tokens, `rewards` in scorable rows only.

    `before`: the same columns of the usual batch; what was no number there is not looked at.
    """
    for name in [n for n in TRAINED_ON if n in values]:
        ok = torch.isfinite(values[name])
        if before is not None:
            ok = ok | ~torch.isfinite(before[name])
        if name == "rewards":
            ok = ok | torch.isnan(batch.rewards)
        if ok.ndim == 2:
            ok = ok | ~batch.response_mask
        if not bool(ok.all()):
            raise Failed("finite numbers", f"{when}, {hook.name} gives {name} that are not", hint)


def _remark(values: dict[str, Any]) -> str:
    """Whether the advantages are all 0, as those of most group-relative rules are here."""
    if "advantages" not in values:
        return ""
    return "advantages are 0" if bool((values["advantages"] == 0).all()) else "advantages are not 0"
