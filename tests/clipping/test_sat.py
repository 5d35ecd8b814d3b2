"""SAT's gate and radii: invariants, where it is PPO, and its sequence form."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.testing.evaluation.building import run_loss

PPO = {"clip": rlx.create("clip", "ppo", eps_low=0.2, eps_high=0.2)}


def sat(**parameters):
    return {"clip": rlx.create("clip", "sat", **{"denominator": "logp_old", **parameters})}


def columns_of(drift, mask=None, advantages=None):
    drift = torch.as_tensor(drift, dtype=torch.float64)
    mask = torch.ones(drift.shape) if mask is None else mask
    advantages = torch.ones(len(drift)).double() if advantages is None else torch.as_tensor(advantages).double()
    return {
        "logp_new": drift - 1,
        "logp_old": torch.full_like(drift, -1),
        "response_mask": mask,
        "advantages": advantages,
    }


def random_columns(seed):
    g = torch.Generator().manual_seed(seed)
    drift = torch.randn(4, 6, generator=g, dtype=torch.float64) * 0.3
    mask = torch.rand(4, 6, generator=g) < 0.8
    return columns_of(drift, mask, torch.randn(4, generator=g, dtype=torch.float64))


def region_of(part, columns):
    batch = rlx.RolloutBatch(
        {"response_mask": columns["response_mask"].bool(), "logp_old": columns["logp_old"], "group": torch.arange(9)}
    )
    return part["clip"].trust_region(rlx.PolicyTerms(columns["logp_new"], batch))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.5, 0.8, 0.9]))
def test_only_the_drifted_side_of_the_most_drifted_tokens_contracts(seed, quantile):
    columns = random_columns(seed)
    mask, d = columns["response_mask"], columns["logp_new"] - columns["logp_old"]
    region = region_of(sat(quantile=quantile), columns)
    assert region.gate.sum() <= (1 - quantile) * mask.sum() + 1e-9
    assert (region.c_minus[d > 0] == 1).all() and (region.c_plus[d < 0] == 1).all()
    assert (torch.minimum(region.c_plus, region.c_minus)[region.gate] < 0.5).all()
    assert ((region.lower >= 0.8) & (region.lower <= 1) & (region.upper >= 1) & (region.upper <= 1.2)).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_no_token_loses_less_than_under_ppo(seed):
    columns = random_columns(seed)
    ours, ppo = run_loss(sat(quantile=0.5), **columns), run_loss(PPO, **columns)
    assert (ours["per_token_loss"] >= ppo["per_token_loss"]).all()
    assert ours["loss"] > ppo["loss"] or torch.equal(ours["per_token_loss"], ppo["per_token_loss"])


@pytest.mark.parametrize(
    ("drift", "quantile"),
    [
        ([[0.3, -0.5, 0.9, -0.1]], 1.0),
        ([[0.25, 0.25, 0.25, 0.25]], 0.5),
        ([[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9]], 0.9),
    ],
    ids=["quantile 1", "all drifts equal", "nine of ten on policy"],
)
def test_a_closed_gate_is_ppo(drift, quantile):
    columns = columns_of(drift)
    ours, ppo = run_loss(sat(quantile=quantile), **columns), run_loss(PPO, **columns)
    assert ours["gated"] == 0
    for name in ("loss", "grad_logp"):
        torch.testing.assert_close(ours[name], ppo[name])


@pytest.mark.parametrize(("quantile", "n", "rank"), [(0.9, 10, 9), (0.9, 11, 10), (0.28, 25, 7), (0.01, 5, 1)])
def test_the_quantile_is_the_smallest_drift_that_reaches_the_level(quantile, n, rank):
    drift = torch.arange(1, n + 1, dtype=torch.float64)[None] / 64  # exact in binary
    assert region_of(sat(quantile=quantile), columns_of(drift)).q == rank / 64


def test_scaling_all_drifts_leaves_gate_and_factors():
    columns = random_columns(2)
    wide = {**columns, "logp_new": columns["logp_old"] + 4 * (columns["logp_new"] - columns["logp_old"])}
    for one, other in zip(region_of(sat(), columns)[1:4], region_of(sat(), wide)[1:4], strict=True):
        torch.testing.assert_close(one, other)


def test_a_gated_token_has_the_gradient_of_its_narrow_interval():
    # q = 0.05, psi(log 1.1 / q) = 0.22: the upper bound of the third token is 1.043 and its gradient is gone; under a
    # negative advantage the plain branch binds and it keeps -A r.
    for advantage, want in ((1.0, 0.0), (-1.0, 1.1)):
        columns = columns_of([[0.02, 0.05, math.log(1.1), 0.0]], advantages=[advantage])
        out = run_loss(sat(quantile=0.75), **columns)
        assert float(out["grad_logp"][0, 2]) == pytest.approx(want / 4, rel=1e-6)
        assert out["grad_logp"][0, 1] == pytest.approx(-advantage * math.exp(0.05) / 4)


def test_masked_rows_with_garbage_do_not_enter_the_quantile():
    columns = columns_of([[0.1, 0.2, 0.3], [0.0, 0.0, 0.0]], torch.tensor([[1.0, 1, 1], [0, 0, 0]]))
    columns["logp_new"][1], columns["logp_old"][1] = torch.nan, torch.inf
    out = run_loss(sat(quantile=0.5), **columns)
    assert out["q"] == pytest.approx(0.2)
    assert torch.isfinite(out["grad_logp"]).all() and torch.isfinite(out["loss"])


def test_no_active_token_gives_loss_zero():
    out = run_loss(sat(), **columns_of([[0.5, 0.2]], torch.zeros(1, 2)))
    assert out["loss"] == 0 and out["q"] == 0 and not out["grad_logp"].any()


def test_an_infinite_drift_closes_the_interval_and_stays_finite():
    columns = columns_of([[0.1] * 9 + [0.0]])
    columns["logp_old"][0, 9] = -torch.inf
    out = run_loss(sat(), **columns)
    assert torch.isfinite(out["loss"]) and out["per_token_loss"][0, 9] == -1


def test_the_sequence_form_gates_whole_rows_by_their_mean_drift():
    part = {**sat(level="sequence", quantile=0.5), "ratio": rlx.create("ratio", "sequence")}
    columns = columns_of([[0.3, -0.1], [0.9, 0.5]], advantages=[1, -1])
    region = region_of(part, columns)
    assert region.q == pytest.approx(0.1) and region.gate.tolist() == [[False, False], [True, True]]
    assert region.c_plus[1].tolist() == pytest.approx([1 / 50, 1 / 50])
    out = run_loss(part, **columns, agg="seq-mean-token-mean")
    row = torch.tensor([-math.exp(0.1), math.exp(0.7)], dtype=torch.float64) / 4
    torch.testing.assert_close(out["grad_logp"], row[:, None].expand(2, 2))


def test_a_token_the_engine_could_not_score_has_no_drift_at_the_start_of_the_step():
    batch = rlx.RolloutBatch(
        {
            "response_mask": torch.ones(1, 3).bool(),
            "logp_old": torch.full((1, 3), -1.0),
            "logp_rollout": torch.tensor([[torch.nan, -1.5, -1.25]]),
            "group": torch.zeros(1).long(),
        }
    )
    region = rlx.create("clip", "sat", quantile=0.5).trust_region(rlx.PolicyTerms(torch.full((1, 3), -1.0), batch))
    assert region.q == 0.25 and region.gate.tolist() == [[False, True, False]]


def test_the_loss_never_waits_for_the_device():
    columns = {k: v.to("meta") for k, v in random_columns(0).items()}
    batch = rlx.RolloutBatch(
        {"response_mask": columns["response_mask"], "logp_old": columns["logp_old"], "group": torch.arange(4)}
    )
    terms = rlx.PolicyTerms(columns["logp_new"], batch, advantages=columns["advantages"][:, None])
    terms.ratio = rlx.create("ratio", "token")(terms)
    loss, _ = sat()["clip"](terms)
    assert loss.is_meta, "meta tensors refuse to be read"


HOST = rlx.HostProfile("any", signals=frozenset({"logp_old", "logp_rollout"}))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_method_divides_by_the_policy_that_generated(level):
    parts = rlx.build({"method": {"name": "sat", "level": level, "quantile": 0.8}}, HOST)
    assert (parts.one("ratio").name, parts.one("ratio").denominator) == (level, "logp_rollout")
    assert (parts.one("clip").denominator, parts.one("clip").quantile) == ("logp_rollout", 0.8)


def test_a_ratio_of_another_level_is_refused():
    with pytest.raises(rlx.ConfigError, match="clip sat works with ratio=sequence only, got ratio=token"):
        rlx.build({"clip": {"name": "sat", "level": "sequence"}, "ratio": "token"}, HOST)
