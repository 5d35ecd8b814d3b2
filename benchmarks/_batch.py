"""A scored batch with every signal a built-in part reads, in the shapes and types in which hosts hand it over.

Rollouts of several turns with tool output, in ragged groups, some with a hint, some forked from another; annotated by
every part that does so at the end of the rollout, and packed. Their tokens are those of the table host, so that the
fields and settings of the conformance suite apply. Log-probabilities and the like are random numbers.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from typing import Any

import torch

import rlx_plugins as rlx
from rlx_plugins.core.host import CAPABILITIES, TOKEN_SIGNALS
from rlx_plugins.core.operations import Forward, Operation, as_steps
from rlx_plugins.core.registry import builtin_names, implements
from rlx_plugins.hosts.signals import token_column
from rlx_plugins.hosts.table import BAD, CALL, EOS, GOOD
from rlx_plugins.hosts.table.facts import FACTS
from rlx_plugins.hosts.table.policy import TOOL, score
from rlx_plugins.testing.conformance.setting import FIELDS, Setting

UPDATE_KINDS = ("reward", "advantage", "correction", "aggregate", "selector", "ratio", "clip")
TURNS = 4
VERSION = 3
"""Weight updates before this step: the tokens are up to three updates old."""
HIDDEN = 64
TOP, VOCABULARY = 5, 64
"""Tokens in the engine's top-k, and the ids they are drawn from."""


def sizes(rows: int, tokens: int) -> argparse.Namespace:
    """--rows and --tokens of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=rows, help=f"rollouts (default {rows})")
    parser.add_argument("--tokens", type=int, default=tokens, help=f"longest response in tokens (default {tokens})")
    return parser.parse_args()


def config(kind: str, name: str) -> dict[str, Any]:
    """A part with what it can't run without on the update side; hints and forks are in the batch already."""
    return {key: spec for key, spec in Setting.of(kind, name).config().items() if key in UPDATE_KINDS}


def build(chosen: Mapping[str, Any], batch: rlx.RolloutBatch) -> rlx.Parts:
    """The parts of a configuration, for a host that supplies what the batch has."""
    return rlx.build(chosen, rlx.HostProfile("benchmark", frozenset(batch), frozenset(CAPABILITIES)))


def scored_batch(rows: int, tokens: int, seed: int = 0) -> rlx.RolloutBatch:
    """`rows` rollouts of up to `tokens` tokens, with every column the hosts, their users and the parts supply."""
    groups = rollout_groups(rows, tokens, seed)
    annotate(groups)
    batch = rlx.pack(groups, version=VERSION, step=1, total_steps=10)
    shape, g = batch.response_mask.shape, torch.Generator().manual_seed(seed)
    lengths = [len(r) for r in batch.rollout]
    supplied = {
        name: token_column(name, batch[name], lengths, shape[1], lambda row: f"row {row}")
        for name in sorted(TOKEN_SIGNALS & set(FIELDS))
    }

    def near(logp: torch.Tensor, spread: float) -> torch.Tensor:
        return (logp + spread * torch.randn(shape, generator=g)).clamp(max=-1e-3)

    old = -2 * torch.rand(shape, generator=g) - 0.05
    engine = near(old, 0.05)
    top = torch.rand(*shape, TOP, generator=g).sort(-1, descending=True).values
    return batch.with_columns(
        **supplied,
        logp_old=old,
        logp_rollout=torch.where(batch.turn_ids >= 0, engine, torch.nan),
        logp_behavior=near(old, 0.05),
        logp_ref=near(old, 0.2),
        logp_teacher=near(old, 0.5),
        logp_prox=near(old, 0.05),
        entropy=-old * torch.rand(shape, generator=g),
        values=torch.rand(shape, generator=g),
        correct=batch.rewards > 0.5,
        rollout_top_ids=torch.randint(VOCABULARY, (*shape, TOP), generator=g),
        rollout_top_logp=(top / top.sum(-1, keepdim=True) * 0.9).log(),
    )


def rollout_groups(rows: int, tokens: int, seed: int = 0) -> list[rlx.Group]:
    """Finished, scored groups of 1 to 15 rollouts. In every second one, a third are forks; every fourth has hints."""
    draw, groups, made = random.Random(seed), [], 0
    while made < rows:
        n = len(groups)
        key = f"p{n}"
        columns = {"solution": [GOOD, EOS], "hint": [GOOD, GOOD], "domain": n % 3, "prior": draw.random()}
        group = rlx.Group(f"{key}#1.{n}", key, [100 + n], tokens, extras=columns)
        size = min(draw.randint(1, 15), rows - made)
        forks = size // 3 if n % 2 else 0
        for i, rollout in enumerate(group.start(size - forks)):
            if n % 4 == 0 and i % 2:
                rollout.context = columns["hint"]
                rollout.segments.append(rlx.Segment([GOOD] * (tokens // 32), "hint"))
            respond(rollout, draw)
        parent = group.rollouts[0]
        for rollout in group.fork(parent, sum(len(s.tokens) for s in parent.segments[:2]), forks):
            respond(rollout, draw)
        for rollout in group.rollouts:
            rollout.extras |= columns | {name: field(rollout) for name, field in (FACTS | FIELDS).items()}
        groups.append(group)
        made += size
    return groups


def respond(rollout: rlx.Rollout, draw: random.Random) -> None:
    """Append turns, tool output between them, and the end; score the rollout."""
    left = rollout.max_tokens - len(rollout)
    length = draw.randint(min(TURNS * 4, left), left)
    done = sum(s.source == "tool" for s in rollout.segments)
    turns = draw.randint(1, TURNS - done)
    own = length // turns - length // 32
    for turn in range(done, done + turns):
        last = turn == done + turns - 1
        steps = draw.choices((BAD, GOOD), k=max(own - 1, 1))
        rollout.segments.append(
            rlx.Segment([*steps, EOS if last else CALL], version=VERSION - draw.randint(0, VERSION), turn=turn)
        )
        if not last:
            rollout.segments.append(rlx.Segment([TOOL] * (length // 32), "tool", turn=turn))
    rollout.finish("eos")
    rollout.reward, rollout.components = score(rollout.tokens, ended=True)


def annotate(groups: list[rlx.Group]) -> None:
    """Let every built-in part that annotates do so."""
    longest, prompts = max(g.max_tokens for g in groups), {g.prompt_key: g.prompt for g in groups}
    ctx = rlx.Context(1, 10, len(groups), 8, longest, prompts)
    generator = torch.Generator().manual_seed(0)

    def execute(operation: Operation) -> list[torch.Tensor]:
        assert isinstance(operation, Forward) and operation.want == "hidden", operation
        return list(torch.randn(len(operation.rollouts), HIDDEN, generator=generator))

    for kind in UPDATE_KINDS:
        for name in sorted(builtin_names(kind)):
            part = Setting.of(kind, name).part()
            if implements(part, "annotate"):
                rlx.drive(as_steps(part.annotate(groups, ctx)), execute)
