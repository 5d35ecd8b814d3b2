"""EHPO: a product of format, correctness and honest tags, scaled by how well fast and slow thinking fit the prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..core.batch import RolloutBatch
from ..core.kinds import Columns, Reward
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, wide
from ..core.terms import masked

REFLECTION = ("wait", "hmm", "alternatively", "double-check", "let me verify")
"""Words that make a unit one of reflection; reconstructed."""


@register("reward", "ehpo")
@dataclass
class EHPO(Reward):
    """An adaptive reasoner tags its thinking as easy (fast) or hard (slow) units. It is rewarded only for a well-formed
    and correct response whose units are what their tags say, the more the better the mix fits the prompt: easy units
    where the group mostly solves it, hard ones where it mostly fails.

        p_easy = E / (E + H), p_hard = H / (E + H);   pi = share of correct rows in the group
        mode = floor + (1 - floor) (pi p_easy + (1 - pi) p_hard)
        unit = 1 if no easy unit reflects and no hard unit lacks reflection, else 0
        reward = format_ok correct unit mode

    Reads format_ok, correct, easy_units, hard_units, easy_with_reflection, hard_without_reflection [B] (numbers or
    flags), for `by="tokens"` easy_tokens and hard_tokens in place of the counts, and group [B]; `tagged_units` below
    makes them of a response's text. Returns rewards, ehpo_mode, ehpo_pass_rate and ehpo_unit [B]. A row with an unknown
    (NaN) input gets 0, unless its raw reward is NaN: then it stays unscorable and does not enter pi. Rows without units
    have mode `floor`.

    The floor, the proportions of units and the check of their tags are reconstructions.
    """

    paper = "Adaptive Dual Reasoner (EHPO), arXiv 2510.10207"
    provides = frozenset({"ehpo_mode", "ehpo_pass_rate", "ehpo_unit"})
    scope = "group"

    floor: float = param(0.5, ge=0, le=1, doc="beta: the mode term of a mix that does not fit at all; reconstructed")
    by: Literal["units", "tokens"] = param("units", doc="what the proportions count; reconstructed")

    @property
    def requires(self) -> frozenset[str]:
        checks = {"format_ok", "correct", "easy_with_reflection", "hard_without_reflection"}
        return frozenset(checks | {f"easy_{self.by}", f"hard_{self.by}"})

    def __call__(self, batch: RolloutBatch) -> Columns:
        checks = ("easy_with_reflection", "hard_without_reflection")
        names = ("format_ok", "correct", f"easy_{self.by}", f"hard_{self.by}", *checks)
        columns = torch.stack([batch[name].to(batch.dtype) for name in names], 1)
        known = torch.isfinite(columns).all(1)
        well_formed, correct, easy, hard, reflecting, lacking = columns.nan_to_num(0.0).unbind(1)
        unscorable = torch.isnan(wide(batch.rewards))
        judged = counted(columns[:, 1]) & ~unscorable
        rate = batch.groups.spread(batch.groups.mean(columns[:, 1], judged))
        total = easy + hard
        whole = torch.where(total > 0, total, torch.ones_like(total))
        share, rest = masked(easy / whole, total > 0), masked(hard / whole, total > 0)
        mode = self.floor + (1 - self.floor) * (rate * share + (1 - rate) * rest)
        unit = ((reflecting == 0) & (lacking == 0)).to(mode.dtype)
        reward = masked(well_formed * correct * unit * mode, known)
        return {
            "rewards": torch.where(unscorable, torch.full_like(reward, torch.nan), reward),
            "ehpo_mode": mode,
            "ehpo_pass_rate": rate,
            "ehpo_unit": unit,
        }


def tagged_units(
    text: str, easy: str = "easy", hard: str = "hard", reflection: Sequence[str] = REFLECTION
) -> dict[str, int]:
    """The counts `reward: ehpo` reads, of a response with <easy>...</easy> and <hard>...</hard> units."""

    def units(tag: str) -> list[bool]:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S | re.I)
        return [any(re.search(rf"\b{re.escape(word)}\b", unit, re.I) for word in reflection) for unit in found]

    fast, slow = units(easy), units(hard)
    return {
        "easy_units": len(fast),
        "hard_units": len(slow),
        "easy_with_reflection": sum(fast),
        "hard_without_reflection": slow.count(False),
    }
