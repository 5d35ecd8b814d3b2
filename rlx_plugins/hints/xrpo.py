"""XRPO's seeding: prompts whose rollouts all failed are tried again after solved examples of similar ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.context import Context
from ..core.errors import DataError
from ..core.kinds import Hint
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.trajectory import Group, Rollout
from ._behavior import engine_logp, lacks_behavior, record_behavior

SEEDED = "seeded"
"""Tag of a rollout sampled after examples; it is the row's `source` in the batch."""


class Example(NamedTuple):
    """An entry of the corpus chosen for a prompt: its position, similarity to the prompt, and length in tokens."""

    index: int
    similarity: float
    tokens: int


@register("hint", "xrpo")
@dataclass
class XRPO(Hint):
    """Further rollouts of a prompt that has no reward above `success_threshold` yet begin with up to `examples` solved
    prompts, the most similar ones of a corpus of earlier successes, so that some of them may succeed.

    Similarity is the cosine of the prompts' embeddings, the dataset column `column` (one vector per prompt). A prompt's
    own solution is never used. Examples are taken by similarity, then by age, while their tokens, at most
    `max_example_tokens` each, fit into `budget_tokens`; one that does not fit is skipped. Without any the prompt is
    sampled plainly. An example is the prompt and the response of the earlier rollout; a longer one loses the end of its
    reasoning and keeps its last `answer_tokens` tokens.

    Examples stand before the prompt and belong to it: rows are trained with the prompt they were sampled from
    (train_on="augmented"), and plain and seeded rows of a prompt are one group. With "plain" rows are trained on the
    prompt alone, and `logp_behavior` records what the engine reported, for a ratio with `denominator: logp_behavior`.

    It acts on rollouts an allocator adds (`method: xrpo`) and adds `extra` of its own to a failed prompt without any.
    After each step the corpus gets the shortest success of every solved prompt, one entry per prompt, the newest.
    """

    paper = "XRPO: eXplore - eXploit GRPO, arXiv 2510.06672"

    column: str = param("embedding", doc="dataset column with the prompt's embedding, a list of numbers")
    examples: int = param(2, ge=1, doc="examples of a prompt, K; the paper's 2")
    min_similarity: float = param(-1.0, ge=-1, le=1, doc="least similarity of an example; reconstructed, off")
    max_example_tokens: int = param(1024, ge=1, doc="tokens of an example; reconstructed")
    budget_tokens: int = param(2048, ge=1, doc="tokens of all examples of a prompt; reconstructed")
    answer_tokens: int = param(64, ge=0, doc="tokens at the end of an example that are never cut; reconstructed")
    max_prompt_tokens: int | None = param(None, ge=1, doc="of examples and prompt; None: unbounded")
    extra: int | None = param(None, ge=0, doc="seeded rollouts beside an allocator's; None: half of group_size")
    success_threshold: float = param(0.0, doc="a rollout succeeded if its reward is above it")
    train_on: Literal["augmented", "plain"] = param("augmented", doc="prompt that seeded rows are trained with")

    corpus: list = state(factory=list)

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({self.column} | ({"logp_rollout"} if self.train_on == "plain" else set()))

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"logp_behavior"} if self.train_on == "plain" else ())

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"rounds"})

    @property
    def idle_hooks(self) -> frozenset[str]:
        return frozenset({"more"} if self.extra == 0 else ()) | (
            {"annotate"} if self.train_on == "augmented" else set()
        )

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        failed = [g for g in idle if self.failed(g) and not any(r.tag == SEEDED for r in g.rollouts)]
        extra = max(1, ctx.group_size // 2) if self.extra is None else self.extra
        return [r for g in failed if extra and self.chosen(g) for r in g.start(extra)]

    def prepare(self, new: list[Rollout], groups: dict[str, Group], ctx: Context) -> None:
        starting = [r for r in new if not r.segments and r.prompt == groups[r.group].prompt]
        prompts = {id_: self.augmented(groups[id_]) for id_ in {r.group for r in starting} if self.failed(groups[id_])}
        for r in starting:
            if len(prompts.get(r.group, r.prompt)) > len(r.prompt):
                r.prompt, r.tag = list(prompts[r.group]), r.tag or SEEDED
        seeded = sum(len(p) > len(groups[id_].prompt) for id_, p in prompts.items())
        ctx.log("hint/xrpo_seeded", ctx.metrics.get("hint/xrpo_seeded", 0.0) + seeded)

    def annotate(self, groups: list[Group], ctx: Context) -> None:
        """Give seeded rows the plain prompt back, and record what they were sampled with."""
        for g in groups:
            for r in g.done():
                if self.train_on == "plain" and r.tag == SEEDED:
                    if any(map(lacks_behavior, r.segments)):
                        record_behavior(r, engine_logp(self, r, "hint.train_on=augmented"))
                    r.prompt = list(g.prompt)

    def observe(self, groups: list[Group], ctx: Context) -> None:
        new: dict[str, dict[str, Any]] = {}
        for g in groups:
            solved = [r for r in g.done() if r.scorable and r.reward is not None and r.reward > self.success_threshold]
            if solved:
                new[g.prompt_key] = {
                    "prompt_key": g.prompt_key,
                    "embedding": self.embedding(g),
                    "question": list(g.prompt),
                    "answer": min(solved, key=len).tokens,
                }
        self.corpus = [e for e in self.corpus if e["prompt_key"] not in new] + list(new.values())
        ctx.log("hint/xrpo_corpus", len(self.corpus))

    def chosen(self, group: Group) -> list[Example]:
        """The examples for a prompt, most similar first; [] where the corpus offers none."""
        if not self.corpus:
            return []
        query = self.embedding(group)
        cosines = _cosine(torch.stack([e["embedding"] for e in self.corpus]), query)
        similarity = torch.round(cosines, decimals=12).tolist()  # equal directions are ties
        ranked = sorted((i for i, s in enumerate(similarity) if s >= self.min_similarity), key=lambda i: -similarity[i])
        chosen: list[Example] = []
        room = self.budget_tokens
        for i in ranked:
            n = min(len(self.corpus[i]["question"]) + len(self.corpus[i]["answer"]), self.max_example_tokens)
            if self.corpus[i]["prompt_key"] != group.prompt_key and n <= room and len(chosen) < self.examples:
                chosen.append(Example(i, similarity[i], n))
                room -= n
        limit = math.inf if self.max_prompt_tokens is None else self.max_prompt_tokens
        while chosen and sum(e.tokens for e in chosen) + len(group.prompt) > limit:
            chosen.pop()
        return chosen

    def augmented(self, group: Group) -> list[int]:
        """The prompt with its examples before it."""
        examples = [self._cut(self.corpus[e.index], e.tokens) for e in self.chosen(group)]
        return [t for example in examples for t in example] + group.prompt

    def _cut(self, entry: dict[str, Any], length: int) -> list[int]:
        """An example of `length` tokens: what does not fit is cut out before the final answer."""
        tokens = entry["question"] + entry["answer"]
        tail = min(self.answer_tokens, len(entry["answer"]), length)
        return tokens[: length - tail] + (tokens[len(tokens) - tail :] if tail else [])

    def embedding(self, group: Group) -> Tensor:
        """The prompt's embedding, float64."""
        given = group.extras.get(self.column)
        try:
            vector = torch.as_tensor(given, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            vector = torch.zeros(())
        if vector.ndim != 1 or len(vector) == 0:
            raise DataError(
                f"hint xrpo: column {self.column!r} of prompt {group.prompt_key!r} must be a list of numbers,"
                f" got {given!r}"
            )
        if self.corpus and len(vector) != len(self.corpus[0]["embedding"]):
            raise DataError(
                f"hint xrpo: the embedding of prompt {group.prompt_key!r} has {len(vector)} numbers, those of the"
                f" corpus {len(self.corpus[0]['embedding'])}; all prompts need the same encoder"
            )
        return vector

    def failed(self, group: Group) -> bool:
        """Something was scored, and nothing of it is a success."""
        rewards = [x for x in group.rewards() if not math.isnan(x)]
        return bool(rewards) and max(rewards) <= self.success_threshold


def _cosine(rows: Tensor, query: Tensor) -> Tensor:
    """Cosine of each row [N,D] with the query [D]; 0 where either is zero."""
    norms = rows.norm(dim=1).clamp(min=1e-12) * query.norm().clamp(min=1e-12)
    return rows @ query / norms
