"""Function forms of the rewards without labels, with a memory, of several axes, by tags and by overlong length."""

from __future__ import annotations

from typing import Any

import torch

from ...core.registry import create
from ...rewards.meds import unit
from ...rewards.smith import AXES
from .building import reward_batch, tensor

Result = dict[str, Any]


def rler(
    answers,
    answers_by_model,
    self_model=0,
    mode="adaptive",
    lam=None,
    n_select=None,
    conf_share=0.5,
    confident_share=None,
) -> Result:
    part = create(
        "reward",
        "rler",
        mode=mode if lam is None else lam,
        n_select=n_select or None,
        confident_share=conf_share if confident_share is None else confident_share,
    )
    vote = part.vote(answers, answers_by_model, self_model)
    return {
        "rewards": vote.rewards,
        "pseudo_label": vote.label,
        "lam": vote.hardness,
        "confidence": vote.confidence,
        "disagreement": vote.disagreement,
        "selected": vote.selected,
    }


def meds(
    rewards,
    correct,
    features,
    memory,
    labels,
    alpha=0.1,
    beta=0.2,
    k=3,
    count_noise=False,
    target="wrong",
    cap_log=None,
    penalty_coef=None,
    max_penalty=None,
    neighbours=None,
) -> Result:
    """All rows are answers to one prompt; also returns `labels` of the memory after the step."""
    part = create(
        "reward",
        "meds",
        penalty_coef=alpha if penalty_coef is None else penalty_coef,
        max_penalty=beta if max_penalty is None else max_penalty,
        neighbours=k if neighbours is None else neighbours,
        count_noise=count_noise,
        target=target,
        cap_log=cap_log,
        features="column",
    )
    stored = [unit(f) for f in memory]
    if stored:
        part.stored["p"] = {"features": torch.stack(stored), "labels": list(labels)}  # type: ignore[arg-type]
    given = [None if f is None else tensor(f) for f in features]
    batch = reward_batch(rewards).with_columns(
        correct=tensor(correct), meds_features=given, prompt_key=["p"] * len(given)
    )
    found = part(batch)
    after = part.stored.get("p", {"labels": []})["labels"]
    return {
        "rewards": found["rewards"],
        "penalty": found["meds_penalty"],
        "label": found["meds_label"],
        "labels": after,
    }


def smith(
    rows,
    group,
    weights=(1.0, 1.0, 0.2, 1.0, 1.0),
    t_max=5,
    strict=True,
    want_calls=1,
    eps=0.0001,
    whiten=True,
    max_turns=None,
) -> Result:
    specs = create(
        "method",
        "smith",
        weights=tuple(weights),
        max_turns=t_max if max_turns is None else max_turns,
        strict=strict,
        want_calls=want_calls,
        eps=eps,
    ).expand()
    shaper, credit = (_created(kind, **specs[kind]) for kind in ("reward", "advantage"))
    batch = reward_batch(rewards=[0.0] * len(rows), group=group).with_columns(smith_facts=list(rows))
    batch = batch.with_columns(**shaper(batch))
    found = credit(batch)
    names = specs["advantage"]["weights"]
    alone = [credit.replace(weights={n: float(n == axis) for n in names})(batch)["summed"] for axis in AXES]
    return {
        "components": batch.reward_components,
        "per_axis": torch.stack(alone, 1),
        "summed": found["summed"],
        "advantages": found["advantages"][:, 0] if whiten else found["summed"],
    }


def ehpo(
    format_ok,
    correct,
    group,
    easy_units,
    hard_units,
    easy_with_reflection,
    hard_without_reflection,
    beta=0.5,
    by="units",
    floor=None,
) -> Result:
    part = create("reward", "ehpo", floor=beta if floor is None else floor, by=by)
    columns = {
        "format_ok": format_ok,
        "correct": correct,
        f"easy_{by}": easy_units,
        f"hard_{by}": hard_units,
        "easy_with_reflection": easy_with_reflection,
        "hard_without_reflection": hard_without_reflection,
    }
    batch = reward_batch(rewards=[0.0] * len(correct), group=group)
    found = part(batch.with_columns(**{name: tensor(values) for name, values in columns.items()}))
    return {
        "reward": found["rewards"],
        "mode": found["ehpo_mode"],
        "pass_rate": found["ehpo_pass_rate"],
        "unit": found["ehpo_unit"],
    }


def apriel(
    rewards,
    success=None,
    length=None,
    finished=None,
    group=None,
    max_tokens=16384,
    buffer_tokens=4096,
    gamma=1.0,
    failure_scale=1.0,
    correct=None,
    response_mask=None,
    rate_exponent=None,
) -> Result:
    """`success` may come as correct, `length` as response_mask."""
    part = create(
        "reward",
        "apriel",
        max_tokens=max_tokens,
        buffer_tokens=max(0, buffer_tokens),
        rate_exponent=gamma if rate_exponent is None else rate_exponent,
        failure_scale=failure_scale,
    )
    if response_mask is None:
        n = tensor(length, torch.int64)
        response_mask = torch.arange(max(1, int(n.max()))) < n[:, None]
    batch = reward_batch(rewards, group, response_mask).with_columns(
        correct=tensor(success if correct is None else correct), finished=tensor(finished).bool()
    )
    found = part(batch)
    return {
        "rewards": found["rewards"],
        "penalty": found["overlong_penalty"],
        "scale": found["overlong_scale"],
    }


def _created(kind: str, name: str, **parameters: Any) -> Any:
    return create(kind, name, **parameters)


FORMS = {form.__name__: form for form in (rler, meds, smith, ehpo, apriel)}
