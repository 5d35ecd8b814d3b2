"""What the estimators for turns, trees, summaries, values and evidence all keep to, on ragged groups in any order."""

import math

import pytest
import torch

from rlx_plugins import HostProfile, RolloutBatch, build, create, policy_loss, prepare

WIDTH = 6
EVERY = {
    "a2tgpo": {},
    "arpo": {"tree": "column"},
    "arpo soft": {"tree": "column", "mode": "soft"},
    "datpo": {"tree": "column"},
    "elpo": {"tree": "column"},
    "resum": {},
    "rtmc": {},
    "rtmc normalised": {"normalize": True},
    "v05": {},
    "v05 batch": {"scale": "batch"},
    "sao": {},
    "iapo": {},
    "echo": {},
    "echo additive": {"additive_coef": 0.3, "confidence": "sampled"},
}
OF_THE_BATCH = {"v05 batch", "echo", "echo additive"}
every = pytest.mark.parametrize("case", EVERY)


def rows(seed, groups=(3, 1, 4)):
    """Rows of ragged groups: turns with tool output between them, the first two rows of a group share their prefix."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for group, size in enumerate(groups):
        for slot in range(size):
            length = int(torch.randint(2, WIDTH + 1, (), generator=g))
            turn = torch.tensor([0, -1, 1, 1, -1, 2])[:length]
            shared = slot < 2
            node = torch.where(turn < 0, -1, torch.where(turn == 0, 0 if shared else 10 + slot, 20 + slot))
            turns = int(turn.max()) + 1

            def draw(n=()):
                return torch.rand(n, generator=g, dtype=torch.float64)

            out.append(
                {
                    "group": group * 7 - 3,
                    "rewards": float(torch.randint(-4, 5, (), generator=g)) / 4,
                    "turn_ids": turn,
                    "node_ids": node,
                    "node_path": [int(n) for n in dict.fromkeys(node[node >= 0].tolist())],
                    "info_gain": (draw(turns - 1) - 0.5).tolist(),
                    "block_embedding": (draw((len(set(node[node >= 0].tolist())), 3)) - 0.5).tolist(),
                    "n_natural": slot % 3,
                    "n_artificial": slot % 2,
                    "is_artificial_branch": slot == 3,
                    "state_ids": ["start"] + [f"s{slot % 2}"] * (turns - 1),
                    "action_ids": [f"a{int(draw() * 2)}" for _ in range(turns)],
                    "value_prior": 0.25 * group - 0.3,
                    "values": draw(length),
                    "support_edges": [[0, turns - 1], [0, 7]],
                    "failed_edges": [[0, 1]],
                    "error": [slot % 2] * turns,
                    "direct_user": [1],
                    "entropy": draw(length),
                    "confidence": draw(length),
                    "logp_old": -draw(length),
                }
            )
    return out


PADDING = {"turn_ids": -1, "node_ids": -1}
TENSORS = {"rewards", "n_natural", "n_artificial", "is_artificial_branch", "value_prior"}


def batch_of(rows, dtype=torch.float64, garbage=0.0):
    columns = {"group": torch.tensor([r["group"] for r in rows]), "row_id": torch.arange(len(rows))}
    for name in rows[0].keys() - {"group"}:
        values = [r[name] for r in rows]
        if name in TENSORS:
            columns[name] = torch.tensor([float(v) for v in values], dtype=dtype)
        elif isinstance(values[0], torch.Tensor):
            fill = PADDING.get(name, garbage)
            kind = torch.int64 if name in PADDING else dtype
            columns[name] = torch.full((len(rows), WIDTH), fill, dtype=kind)
            for b, v in enumerate(values):
                columns[name][b, : len(v)] = v.to(kind)
                if name not in PADDING:
                    columns[name][b, : len(v)][rows[b]["turn_ids"] < 0] = garbage
        else:
            columns[name] = values
    columns["response_mask"] = columns["turn_ids"] >= 0
    return RolloutBatch({**columns, "keep": torch.ones(len(rows), dtype=torch.bool)}, step=1, total_steps=4)


def advantages(case, batch):
    return create("advantage", case.split()[0], **EVERY[case])(batch)["advantages"]


@every
def test_masked_tokens_have_advantage_zero_and_may_hold_garbage(case):
    given = rows(0)
    clean, dirty = (advantages(case, batch_of(given, garbage=x)) for x in (0.0, math.nan))
    assert torch.equal(clean, dirty)
    assert not clean[~batch_of(given).response_mask].any() and clean.any()


@every
def test_the_order_of_rows_does_not_matter(case):
    given = rows(1)
    order = torch.randperm(len(given), generator=torch.Generator().manual_seed(5))
    got = advantages(case, batch_of([given[i] for i in order.tolist()]))
    torch.testing.assert_close(got, advantages(case, batch_of(given))[order])


@every
def test_an_unscorable_row_changes_nothing_for_the_others(case):
    given = rows(2)
    with_nan = [{**r, "rewards": math.nan} if i in (0, 5) else r for i, r in enumerate(given)]
    without = [r for i, r in enumerate(given) if i not in (0, 5)]
    rest = torch.tensor([i for i in range(len(given)) if i not in (0, 5)])
    got = advantages(case, batch_of(with_nan))
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got[rest], advantages(case, batch_of(without)))


@pytest.mark.parametrize("case", [c for c in EVERY if c not in OF_THE_BATCH])
def test_a_group_is_judged_by_itself(case):
    given = rows(3)
    alone = advantages(case, batch_of([r for r in given if r["group"] == 11]))
    torch.testing.assert_close(advantages(case, batch_of(given))[-4:], alone)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_gives_the_same_up_to_rounding(case, dtype):
    given = rows(4)
    for r in given:  # exact in bfloat16, so that what differs is arithmetic
        r["value_prior"] = round(r["value_prior"] * 8) / 8
        for name in ("values", "entropy", "confidence", "logp_old"):
            r[name] = (r[name] * 16).round() / 16
    got = advantages(case, batch_of(given, dtype))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), advantages(case, batch_of(given)), rtol=1e-3, atol=1e-4)


@every
def test_a_fully_masked_row_and_a_group_of_one_are_no_trouble(case):
    given = rows(6, groups=(1, 2))
    empty = {
        **given[1],
        "turn_ids": torch.tensor([-1, -1]),
        "node_ids": torch.tensor([-1, -1]),
        "info_gain": [],
        "state_ids": [],
        "action_ids": [],
        "error": [],
        "direct_user": [],
        "node_path": [],
        "block_embedding": [],
        **{name: torch.zeros(2, dtype=torch.float64) for name in ("values", "entropy", "confidence", "logp_old")},
    }
    got = advantages(case, batch_of([*given, empty]))
    assert torch.isfinite(got).all() and not got[-1].any()


@every
def test_the_gradient_on_policy_is_minus_the_advantage_over_the_tokens(case):
    batch = batch_of(rows(7), garbage=math.nan)
    spec = {"advantage": {"name": case.split()[0], **EVERY[case]}}
    parts = build(spec, HostProfile("any", signals=frozenset(batch)))
    prepared = prepare(parts, batch).batch
    live = batch.logp_old.clone().requires_grad_()
    loss, _ = policy_loss(parts, prepared, live, totals={"policy": prepared.loss_count.sum()})
    (grad,) = torch.autograd.grad(loss, live)
    torch.testing.assert_close(grad, -prepared.advantages / batch.response_mask.sum())
