"""What every estimator that reshapes credit keeps to, on ragged groups in any order."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_plugins import ConfigError, HostProfile, RolloutBatch, build, create

ROLES = {"segment_weights": [[1.0, 0.0], [1.0, 2.0]]}
EVERY = [
    ("hapo", {}),
    ("hapo", {"base": "rloo", "signed": False}),
    ("sd_grpo", ROLES),
    ("sd_grpo", {**ROLES, "holistic_weight": 0.3, "combine": "normalize_then_sum", "no_boundary": "last"}),
    ("xrpo", {}),
    ("adhint", {}),
    ("adhint", {"pool": "merged"}),
    ("aero", {}),
    ("aero", {"homogeneous": "constant", "stats": "full"}),
    ("cipo", {}),
    ("cipo", {"apply_to": "decision"}),
    ("erils", {}),
    ("erils", {"target_length": 4, "max_external": 1, "homogeneous": "constant"}),
    ("erils", {"statistics": "joint"}),
    ("hbpo", {}),
    ("cadence", {}),
]
every = pytest.mark.parametrize(("name", "params"), EVERY, ids=[f"{n} {p or ''}" for n, p in EVERY])

EIGHTHS = st.integers(-8, 8).map(lambda k: k / 8)  # exact in bfloat16
# group, reward or None, another reward, a switch, length
ROW = st.tuples(st.integers(0, 3), st.one_of(EIGHTHS, st.none()), EIGHTHS, st.booleans(), st.integers(0, 5))
ROWS = st.lists(ROW, min_size=2, max_size=20).filter(lambda rows: any(r[1] is not None for r in rows))
TOKEN_COLUMNS = ("entropy", "logp_old", "boundary_mask", "decision_mask")


def batch_of(rows, dtype=torch.float64, width=5):
    group, reward, other, switch, length = zip(*rows, strict=True)
    rewards = torch.tensor([math.nan if r is None else r for r in reward], dtype=dtype)
    other, switch = torch.tensor(other, dtype=dtype), torch.tensor(switch)
    position = torch.arange(width, dtype=dtype).expand(len(rows), width) + 1
    return RolloutBatch(
        {
            "rewards": rewards,
            "group": torch.tensor(group),
            "response_mask": torch.arange(width) < torch.tensor(length)[:, None],
            "reward_components": torch.stack([rewards, torch.where(rewards.isnan(), rewards, other)], 1),
            "component_names": ("first", "second"),
            "entropy": position / 4 + switch[:, None],
            "logp_old": -position / 8 * (1 + switch[:, None].to(dtype)),
            "boundary_mask": ((position == 2) & switch[:, None]).to(dtype),
            "decision_mask": (position == 2).to(dtype),
            "helped": switch,
            "external": switch,
            "correct": (other > 0).to(dtype),
            "twin_rewards": torch.where(switch, torch.nan, other.double()).to(dtype),
            "budget": torch.where(switch, 2.0, 4.0),
            "budget_baseline": torch.where(switch, 1.0, 0.5).to(dtype),
        }
    )


def advantages(name, params, batch):
    return create("advantage", name, **params)(batch)["advantages"]


def same(got, want, atol=1e-9):
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@every
@settings(max_examples=10, deadline=None)
@given(rows=ROWS)
def test_masked_tokens_and_unscorable_rows_have_advantage_zero_and_nothing_is_nan(name, params, rows):
    batch = batch_of(rows)
    got = advantages(name, params, batch)
    assert got.shape == batch.response_mask.shape and torch.isfinite(got).all()
    assert (got[~batch.response_mask] == 0).all()
    assert (got[batch.rewards.isnan()] == 0).all()


@every
@settings(max_examples=10, deadline=None)
@given(rows=ROWS, shuffle=st.randoms(use_true_random=False))
def test_permuting_the_rows_permutes_the_advantages(name, params, rows, shuffle):
    if params.get("max_external") is not None:  # of rows that tie, the first is taken
        rows = [(g, r if r is None else r + i / 1024, o, s, n) for i, (g, r, o, s, n) in enumerate(rows)]
    order = torch.tensor(shuffle.sample(range(len(rows)), len(rows)))
    batch = batch_of(rows)
    same(advantages(name, params, batch.rows(order)), advantages(name, params, batch)[order])


@every
@settings(max_examples=10, deadline=None)
@given(rows=ROWS)
def test_an_unscorable_row_counts_in_no_statistic_of_rewards(name, params, rows):
    batch = batch_of(rows)
    scored = ~batch.rewards.isnan()
    same(advantages(name, params, batch)[scored], advantages(name, params, batch.rows(scored)))


@every
@settings(max_examples=10, deadline=None)
@given(rows=ROWS)
def test_padding_and_garbage_under_the_mask_change_nothing(name, params, rows):
    batch = batch_of(rows)
    nothing = torch.full((len(rows), 3), torch.nan, dtype=torch.float64)
    padded = batch.with_columns(
        response_mask=torch.cat([batch.response_mask, torch.zeros(len(rows), 3, dtype=torch.bool)], 1),
        **{
            column: torch.cat([torch.where(batch.response_mask, batch[column], torch.nan), nothing], 1)
            for column in TOKEN_COLUMNS
        },
    )
    got = advantages(name, params, padded)
    same(got[:, :5], advantages(name, params, batch))
    assert (got[:, 5:] == 0).all()


@every
@settings(max_examples=10, deadline=None)
@given(rows=ROWS)
def test_the_advantages_of_a_group_depend_on_its_own_rows_only(name, params, rows):
    batch = batch_of(rows)
    together = advantages(name, params, batch)
    for g in batch.group.unique():
        same(together[batch.group == g], advantages(name, params, batch.rows(batch.group == g)))


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rewards_of_any_precision_are_computed_in_float32_or_better(name, params, dtype):
    draw = random.Random(3)
    rows = [
        (k // 6, draw.randint(-8, 8) / 8, draw.randint(-8, 8) / 8, draw.random() < 0.5, draw.randint(0, 5))
        for k in range(48)
    ]
    low = batch_of(rows, dtype).with_columns(entropy=batch_of(rows, torch.float32).entropy)
    got = advantages(name, params, low)
    assert got.dtype == torch.float32
    same(got.double(), advantages(name, params, batch_of(rows)), atol=5e-5)


# ---- on top of another estimator -------------------------------------------------------------------------------------


HOST = HostProfile("any", signals=frozenset({"logp_old", "logp_ref"}))


def test_what_the_base_reads_and_makes_counts_as_its_own():
    plain = create("advantage", "xrpo")
    assert plain.requires == {"logp_old"} and plain.credits == "rewards"
    on_dvao = create("advantage", "xrpo", base="dvao")
    assert on_dvao.requires == {"logp_old", "reward_components"} and on_dvao.credits == "reward_components"
    assert on_dvao.provides == {"novelty", "dynamic_weights"}
    build({"advantage": {"name": "xrpo", "base": {"name": "rloo", "kl_coef": 0.1}}}, HOST)
    with pytest.raises(ConfigError, match="advantage xrpo needs the signal 'reward_components'"):
        build({"advantage": {"name": "xrpo", "base": "dvao"}}, HOST)


def test_the_state_of_the_base_is_saved_and_restored_with_it():
    rows = batch_of([(0, 1.0, 0.0, False, 2), (0, 0.0, 0.0, True, 3), (1, 1.0, 0.0, False, 1)])
    part = create("advantage", "xrpo", base="avspo")
    part(rows)
    resumed = create("advantage", "xrpo", base="avspo")
    resumed.load_state_dict(part.state_dict())
    assert resumed.state_dict() == part.state_dict() and resumed.estimator.previous_mean == pytest.approx(2 / 3)
    with pytest.raises(ConfigError, match="no state of its base"):
        resumed.load_state_dict({})


def test_a_wrong_base_is_refused_when_it_is_configured():
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        create("advantage", "xrpo", base="grppo")
    with pytest.raises(ConfigError, match="unknown parameter 'scal'"):
        create("advantage", "cipo", base={"name": "grpo", "scal": "none"})
    with pytest.raises(ConfigError, match="hapo can't be a base, it has the hook in_loss"):
        create("advantage", "xrpo", base="hapo")


def test_a_supplement_to_rewards_needs_a_base_that_reads_rewards():
    with pytest.raises(ConfigError, match="supplements rewards, but dvao reads reward_components"):
        create("advantage", "cipo", base="dvao")
    assert create("advantage", "cipo", base="dvao", apply_to="decision").credits == "reward_components"
