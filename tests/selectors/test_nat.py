"""NAT's two selectors: unbiased by enumeration, reproducible, and full denominators."""

import itertools

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import reward_batch

MASK = [[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
LOSS = [[1.0, 2.0, None, 4.0], [-3.0, None, None, None], [None, None, None, None]]
FULL = {"loss_seq_mean": (7 / 3 - 3) / 2, "loss_token_mean": 4 / 4}


def test_urs_averages_to_the_full_loss_over_all_subsets():
    p, places = 0.3, [(0, 0), (0, 1), (0, 3), (1, 0)]
    mean = dict.fromkeys(FULL, 0.0)
    for kept in itertools.product([True, False], repeat=len(places)):
        u = torch.full((3, 4), 0.99)
        for place, keep in zip(places, kept, strict=True):
            u[place] = 0.1 if keep else 0.9
        out = evaluate("selector", "nat_urs", {"response_mask": MASK, "u": u, "per_token_loss": LOSS}, {"p": p})
        for name in FULL:
            mean[name] += p ** sum(kept) * (1 - p) ** (len(kept) - sum(kept)) * float(out[name])
    assert mean == pytest.approx(FULL)


def test_urs_keeps_everything_at_p_one_and_never_a_masked_token():
    batch = reward_batch(response_mask=MASK)
    torch.testing.assert_close(rlx.create("selector", "nat_urs", p=1.0)(batch)["weight"], torch.tensor(MASK).double())


def wide_batch(rows, tokens, seed=0, step=0):
    batch = reward_batch(response_mask=torch.ones(rows, tokens))
    return rlx.RolloutBatch(batch, seed=seed, step=step)


def test_urs_keeps_the_share_p_independently_of_row_and_neighbour():
    w = rlx.create("selector", "nat_urs", p=0.4)(wide_batch(64, 4096))["weight"]
    assert set(w.unique().tolist()) == {0.0, 2.5}
    keep = (w > 0).double() - 0.4
    n = keep.numel()
    assert abs(float(keep.mean())) < 4 * (0.24 / n) ** 0.5
    for lagged in (keep[:, 1:] * keep[:, :-1], keep[1:] * keep[:-1], keep[:, 2048:] * keep[:, :2048]):
        assert abs(float(lagged.mean())) < 4 * 0.24 / lagged.numel() ** 0.5


def test_urs_draws_by_row_and_step_wherever_the_row_lies_and_however_it_is_padded():
    part = rlx.create("selector", "nat_urs")
    batch = wide_batch(6, 20)
    whole = part(batch)["weight"]
    order = torch.tensor([4, 1])
    torch.testing.assert_close(part(batch.rows(order))["weight"], whole[order])
    torch.testing.assert_close(part(wide_batch(6, 12))["weight"], whole[:, :12])
    assert (part(wide_batch(6, 20, step=1))["weight"] != whole).any()


def test_urs_refuses_a_probability_of_zero():
    with pytest.raises(rlx.ConfigError, match=r"nat_urs\.p: must be > 0"):
        rlx.create("selector", "nat_urs", p=0.0)


@pytest.mark.parametrize("min_prefix", [1, 2, 3, 9])
def test_rpc_averages_to_the_full_loss_over_a_grid_of_uniforms(min_prefix):
    grid = 12  # a multiple of every number of cuts below
    outs = [
        evaluate(
            "selector",
            "nat_rpc",
            {"response_mask": MASK, "u": [(i + 0.5) / grid] * 3, "per_token_loss": LOSS},
            {"min_prefix": min_prefix},
        )
        for i in range(grid)
    ]
    for name, full in FULL.items():
        assert sum(float(o[name]) for o in outs) / grid == pytest.approx(full)
    first = min(min_prefix, 3)
    assert sum(float(o["cut"][0]) for o in outs) / grid == pytest.approx((first + 3) / 2)
    for o in outs:
        assert (o["weights"][0, [0, 1, 3]][: int(o["cut"][0])] >= 1).all()


def test_rpc_keeps_the_tool_tokens_before_the_cut_and_nothing_of_an_empty_row():
    out = evaluate("selector", "nat_rpc", {"response_mask": [[1, 0, 1, 0, 1], [0, 0, 0, 0, 0]], "u": [0.5, 0.5]})
    assert out["cut"].tolist() == [2, 0] and out["model_input_len"].tolist() == [3, 0]
    assert out["weights"].tolist() == [[1.0, 0.0, 1.5, 0.0, 0.0], [0.0] * 5]


@pytest.mark.parametrize("u", [1 - 2**-53, 1.0], ids=["largest float64 uniform", "rounded up in float32"])
def test_rpc_reaches_the_last_token_with_the_largest_uniform_and_its_largest_weight(u):
    inputs = {"response_mask": torch.ones(1, 7), "u": [u]}
    out = evaluate("selector", "nat_rpc", inputs, {"min_prefix": 3})
    assert out["cut"].tolist() == [7] and out["weights"].max() == 5
    capped = evaluate("selector", "nat_rpc", inputs, {"min_prefix": 3, "w_max": 2.0})["weights"]
    assert capped[0].tolist() == pytest.approx([1, 1, 1, 1.25, 5 / 3, 2, 2])


def test_rpc_cut_rows_give_the_loss_of_the_uncut_weights():
    host = rlx.HostProfile("any", signals=frozenset({"logp_old"}), capabilities=frozenset({"cut_rows"}))
    parts = rlx.build({"selector": "nat_rpc"}, host)
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(8) < torch.tensor([[8], [3], [5], [6]])
    batch = reward_batch([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], mask.double()).with_columns(
        logp_old=-torch.rand(4, 8, generator=g, dtype=torch.float64),
        **{"uniform:nat_rpc/cut": torch.tensor([0.5, 0.1, 0.9, 0.3]).double()},
    )
    ready = rlx.prepare(parts, batch).batch
    logp_new = batch.logp_old + 0.1 * torch.randn(4, 8, generator=g, dtype=torch.float64)
    totals = {"policy": ready.loss_count.sum()}
    assert totals["policy"] == mask.sum(), "the denominator is that of the full rows"
    length = int(ready.kept_length.max())
    assert ready.kept_length.tolist() == [5, 1, 5, 2] and length < 8
    whole = rlx.policy_loss(parts, ready, logp_new, totals=totals)[0]
    short = rlx.policy_loss(parts, ready.cut(length), logp_new[:, :length], totals=totals)[0]
    torch.testing.assert_close(short, whole)


def test_rpc_is_refused_beside_rules_that_need_whole_rows_and_on_hosts_that_do_not_cut():
    signals = frozenset({"logp_old"})
    with pytest.raises(rlx.ConfigError, match="selector nat_rpc cuts rows short, but ratio sequence needs full rows"):
        rlx.build(
            {"selector": "nat_rpc", "ratio": "sequence"}, rlx.HostProfile("any", signals, frozenset({"cut_rows"}))
        )
    with pytest.raises(rlx.ConfigError, match="cut_rows"):
        rlx.build({"selector": "nat_rpc"}, rlx.HostProfile("any", signals))
