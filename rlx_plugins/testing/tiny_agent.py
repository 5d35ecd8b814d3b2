"""An agent of several turns on the tiny task, in the form of TRL's ``rollout_func``, and a critic of its work.

Beside TRL's own keys it returns signals by the names methods read them under; a run takes those that its
``rollout_signals`` names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .tiny_engine import TinyPolicy, expression_of, unwrapped
from .tiny_model import build_tiny_tokenizer
from .tiny_tasks import terms_of

__all__ = ["AGENT_SIGNALS", "stepwise_agent", "working_values"]

TURN_TOKENS = 5
"""The longest running total with its sign, and one token that ends it."""

AGENT_SIGNALS = (
    *("info_gain", "support_edges", "failed_edges", "error", "direct_user", "state_ids", "action_ids"),
    *("twin_rewards", "critical_turn", "node_ids", "node_path", "block_embedding"),
)
"""What ``stepwise_agent`` reports of a rollout."""


@dataclass
class _Dialogue:
    """A sum worked out in turns: what was said so far, and where.

    turns  [n] the policy's token ids of each turn
    totals  [n] the running total each turn states, as text; "" where it states none
    heard  [n + 1] number of tokens up to the environment's words before each turn
    """

    terms: list[int]
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    turns: list[tuple[int, ...]] = field(default_factory=list)
    totals: list[str] = field(default_factory=list)
    heard: list[int] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return len(self.turns) == len(self.terms) - 1 or self.totals[-1:] == [""]

    @property
    def next_words(self) -> str:
        n = len(self.turns)
        return f"{self.terms[0]}{self.terms[1]:+d}=" if n == 0 else f"{self.terms[n + 1]:+d}="

    @property
    def wrong(self) -> list[bool]:
        """For each turn, whether its total is not that of the terms so far."""
        return [total != str(sum(self.terms[: n + 2])) for n, total in enumerate(self.totals)]

    def add(self, tokens: Sequence[int], logps: Sequence[float], own: bool) -> None:
        self.tokens += tokens
        self.logps += logps
        self.own += [int(own)] * len(tokens)


def stepwise_agent(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    """An environment reads out the terms ("3+8="), the policy answers each time with the running total ("11").

    The reported log-probs are the policy's, NaN for the environment's words. Signals, one value or list per rollout:
    ``info_gain`` (the policy's probability of the right answer after each turn but the last, less that before); the
    evidence graph of ``advantage: iapo`` (a right turn supports the next one, a wrong one misleads it); ``state_ids``
    and ``action_ids`` by turn; ``twin_rewards`` (1 where the policy is right when it has to answer at once);
    ``critical_turn`` (the first wrong one, -1 without); and the tree of equal beginnings: ``node_ids`` by token,
    ``node_path`` and ``block_embedding`` (the stated number, and 1).
    """
    policy = TinyPolicy(unwrapped(trainer), trainer)
    asked = policy.asked(prompts)
    terms = [terms_of(expression_of(prompt)) for prompt in prompts]
    dialogues = [_Dialogue(t, ids) for t, ids in zip(terms, asked, strict=True)]
    while running := [d for d in dialogues if not d.over]:
        for d in running:
            words = policy.tokens(d.next_words)
            d.add(words, [float("nan")] * len(words), own=False)
            d.heard.append(len(d.tokens))
        for d, (tokens, logps) in zip(running, policy.sample([d.prompt + d.tokens for d in running], TURN_TOKENS)):
            _take_turn(d, policy, tokens, logps)
    groups = [i // trainer.num_generations for i in range(len(prompts))]
    return {
        "prompt_ids": asked,
        "completion_ids": [d.tokens for d in dialogues],
        "logprobs": [d.logps for d in dialogues],
        "env_mask": [d.own for d in dialogues],
        "info_gain": _information_gains(policy, dialogues),
        "support_edges": [[[i, i + 1] for i, w in enumerate(d.wrong[:-1]) if not w] for d in dialogues],
        "failed_edges": [[[i, i + 1] for i, w in enumerate(d.wrong[:-1]) if w] for d in dialogues],
        "error": [list(map(int, d.wrong)) for d in dialogues],
        "direct_user": [[1] * len(d.turns) for d in dialogues],
        "state_ids": [[f"{n}:{before}" for n, before in enumerate(["", *d.totals[:-1]])] for d in dialogues],
        "action_ids": [list(d.totals) for d in dialogues],
        "twin_rewards": _answered_at_once(policy, dialogues),
        "critical_turn": [d.wrong.index(True) if any(d.wrong) else -1 for d in dialogues],
        **_tree(dialogues, groups),
    }


def _take_turn(d: _Dialogue, policy: TinyPolicy, tokens: list[int], logps: list[float]) -> None:
    """Of what the policy sampled: the number it begins with (and the end of sequence behind it), else one token."""
    found = re.match(r"-?\d+", policy.text(tokens))
    n = found.end() if found else 1
    n += found is not None and tokens[n : n + 1] == [policy.end] and len(d.turns) == len(d.terms) - 2
    d.add(tokens[:n], logps[:n], own=True)
    d.turns.append(tuple(tokens[:n]))
    d.totals.append(found.group() if found else "")


def _information_gains(policy: TinyPolicy, dialogues: Sequence[_Dialogue]) -> list[list[float]]:
    probes, answers = [], []
    for d in dialogues:
        for cut in (0, *d.heard[1:]):
            probes.append(d.prompt + d.tokens[:cut])
            answers.append(policy.tokens(str(sum(d.terms))))
    chance = iter(policy.chances(probes, answers))
    found = [[next(chance) for _ in (0, *d.heard[1:])] for d in dialogues]
    return [[after - before for before, after in zip(p, p[1:])] for p in found]


def _answered_at_once(policy: TinyPolicy, dialogues: Sequence[_Dialogue]) -> list[float]:
    """Rewards of the counterfactual rollouts that give the answer without a working."""
    sampled = policy.sample([d.prompt + policy.tokens("=") for d in dialogues], TURN_TOKENS)
    found = [re.match(r"-?\d+", policy.text(tokens)) for tokens, _ in sampled]
    return [float(m is not None and int(m.group()) == sum(d.terms)) for m, d in zip(found, dialogues)]


def _tree(dialogues: Sequence[_Dialogue], groups: Sequence[int]) -> dict[str, list[Any]]:
    """Rollouts of a group that have said the same so far share a node."""
    number: dict[tuple[Any, ...], int] = {}
    node_ids, node_path, embedding = [], [], []
    for d, group in zip(dialogues, groups, strict=True):
        path = [number.setdefault((group, *d.turns[: n + 1]), len(number)) for n in range(len(d.turns))]
        ids = [-1] * len(d.tokens)
        for node, start, turn in zip(path, d.heard, d.turns):
            ids[start : start + len(turn)] = [node] * len(turn)
        node_ids.append(ids)
        node_path.append(path)
        embedding.append([[float(total or 0), 1.0] for total in d.totals])
    return {"node_ids": node_ids, "node_path": node_path, "block_embedding": embedding}


def working_values(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]
) -> list[list[float]]:
    """What a critic would expect before each response token: 0.8, or 0.1 once a running total is wrong.

    In the form of ``value_model``.
    """
    tokenizer = build_tiny_tokenizer()
    return [
        _expected(tokenizer.decode(prompt), [tokenizer.decode([token]) for token in response])
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def _expected(prompt: str, pieces: Sequence[str]) -> list[float]:
    terms = terms_of(prompt)
    truth = [str(sum(terms[: n + 2])) for n in range(len(terms) - 1)]
    values, text = [], ""
    for piece in pieces:
        totals = re.findall(r"\d=(-?\d+)(?=\D)", text)[: len(truth)]
        values.append(0.8 if totals == truth[: len(totals)] else 0.1)
        text += piece
    return values
