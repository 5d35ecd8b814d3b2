"""The rules: a metric, a threshold, the stage of the pipeline, and the kinds to try in order.

Stages, of "Generate, Filter, Control, Replay" (arXiv 2605.02913): G what is proposed, F which signals are made from it,
C what is spent on it, R what is kept. O, the optimiser, and X, what cuts across, lie outside the survey. Its own index
from pathologies to modules could not be read: the rules and their thresholds are reconstructed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

STAGES = {
    "hint": "G",
    "drafter": "G",
    "quant": "G",
    "temperature": "G",
    "reward": "F",
    "selector": "F",
    "sampler": "C",
    "allocator": "C",
    "pruner": "C",
    "replay": "R",
    "advantage": "O",
    "ratio": "O",
    "clip": "O",
    "correction": "O",
    "aggregate": "O",
    "distill": "O",
    "auxiliary": "O",
    "system": "X",
}
"""Kind -> stage; a `method` has those of its parts. Temperature, ratio, aggregate and auxiliary are placed by us."""


@dataclass(frozen=True)
class Rule:
    """A pathology: it is there if `metric` is on the wrong side of `threshold`, or on it.

    above    whether large values are the wrong side
    kinds    what to try, the first first; `system` is the host or the task, not a plug-in
    what     the metric in words
    methods  built-in plug-ins of those kinds that say they address it, as kind=name
    """

    id: str
    metric: str
    above: bool
    threshold: float
    stage: str
    kinds: tuple[str, ...]
    what: str
    methods: tuple[str, ...] = ()


def _rule(id: str, metric: str, sign: str, threshold: float, stage: str, kinds: str, what: str, methods: str) -> Rule:
    return Rule(id, metric, sign == ">=", threshold, stage, tuple(kinds.split()), what, tuple(methods.split()))


RULES = (
    _rule("all_fail", "frac_all_fail", ">=", 0.3, "G", "hint sampler allocator",
          "share of groups without a success",
          "hint=guide hint=adaprefix hint=xrpo hint=adhint sampler=vade allocator=aero"),
    _rule("all_pass", "frac_all_pass", ">=", 0.3, "C", "sampler allocator",
          "share of groups without a failure",
          "sampler=vade allocator=pilot_commit allocator=vigor"),
    _rule("entropy_collapse", "entropy_ratio", "<=", 0.3, "G", "allocator clip advantage",
          "policy entropy now over that at the start",
          "allocator=xrpo clip=clip_cov clip=kl_cov clip=hapo clip=gapo_clip advantage=xrpo"),
    _rule("low_diversity", "distinct_ratio", "<=", 0.5, "G", "allocator sampler replay",
          "different responses per response, within groups",
          "allocator=xrpo allocator=vigor sampler=vade"),
    _rule("length_growth", "length_ratio", ">=", 1.5, "F", "reward",
          "response length now over that at the start",
          "reward=alp reward=lead reward=hbpo reward=apriel"),
    _rule("truncation", "frac_truncated", ">=", 0.2, "F", "reward pruner",
          "share of responses cut at the length limit",
          "reward=apriel pruner=april"),
    _rule("spurious_reward", "audit_corr", "<=", 0.0, "F", "reward system",
          "correlation of the reward with an independent audit",
          "reward=rler"),
    _rule("wasted_tokens", "effective_token_frac", "<=", 0.5, "F", "selector sampler",
          "share of tokens with a weight and an advantage",
          "selector=nat_rpc selector=nat_urs sampler=vade"),
    _rule("engine_mismatch", "rollout_train_kl", ">=", 0.02, "O", "correction quant",
          "KL from the engine's policy to the trainer's, nats per token",
          "correction=tis correction=mis correction=ais"),
    _rule("stale_data", "staleness_mean", ">=", 2.0, "R", "correction clip replay",
          "policy versions between sampling and update",
          "correction=decoupled_ppo correction=ppo_ewma correction=opsm clip=sat"),
    _rule("over_clipping", "clip_frac", ">=", 0.2, "O", "clip correction",
          "share of clipped tokens",
          "clip=bapo clip=gapo_clip clip=sapo"),
    _rule("rollout_bound", "rollout_time_frac", ">=", 0.7, "C", "pruner drafter allocator replay",
          "share of the time spent generating",
          "pruner=april pruner=arrol allocator=pilot_commit replay=rollout_replay"),
    _rule("long_tail", "len_p99_over_p50", ">=", 4.0, "C", "pruner drafter system",
          "99th percentile of the response length over its median",
          "pruner=april"),
    _rule("domain_drift", "domain_ratio_max", ">=", 2.0, "C", "sampler",
          "a domain's share of the trained rows over its share of the data",
          "sampler=in_order"),
    _rule("over_reuse", "reuse_mean", ">=", 4.0, "R", "replay",
          "optimizer passes over a sampled token",
          "replay=rollout_replay"),
)  # fmt: skip


@dataclass(frozen=True)
class Flag:
    """A rule that fired: how far beyond its threshold, in units of it."""

    rule: Rule
    value: float
    threshold: float
    severity: float


@dataclass(frozen=True)
class Diagnosis:
    """flags by falling severity, then in the order of RULES; rules without a metric; kinds worth trying, best first."""

    flags: tuple[Flag, ...]
    unknown: tuple[str, ...]
    try_kinds: tuple[str, ...]


def diagnose(metrics: Mapping[str, float | None], thresholds: Mapping[str, float] | None = None) -> Diagnosis:
    """Apply the rules; a metric that is missing or not finite is unknown. `thresholds` replaces those of rules by id.

    severity = |value - threshold| / max(|threshold|, 1e-9), or |value| where the threshold is 0. A kind's score is the
    sum over flags of 1/(1 + its place in the rule's list).
    """
    flags: list[Flag] = []
    unknown: list[str] = []
    for rule in RULES:
        value = metrics.get(rule.metric)
        threshold = (thresholds or {}).get(rule.id, rule.threshold)
        if value is None or not math.isfinite(value):
            unknown.append(rule.id)
        elif value >= threshold if rule.above else value <= threshold:
            distance = abs(value) if threshold == 0 else abs(value - threshold) / max(abs(threshold), 1e-9)
            flags.append(Flag(rule, float(value), float(threshold), distance))
    flags.sort(key=lambda flag: -flag.severity)
    scores: dict[str, float] = {}
    for flag in flags:
        for place, kind in enumerate(flag.rule.kinds):
            scores[kind] = scores.get(kind, 0.0) + 1 / (1 + place)
    ranked = sorted(scores, key=lambda kind: (-scores[kind], kind))
    return Diagnosis(tuple(flags), tuple(unknown), tuple(ranked))


def stages(kinds: Iterable[str]) -> list[str | None]:
    """The stage of each kind; None for an unknown one."""
    return [STAGES.get(kind) for kind in kinds]
