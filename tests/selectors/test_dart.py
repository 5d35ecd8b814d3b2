"""DART: whole steps above their group's entropy quantile, and the capped weight for the mismatch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import reward_batch

NAN = math.nan


def data(seed=0, rows=6, width=8):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=g) < 0.8
    mask[4] = False
    turn = torch.tensor([[0, 0, 1, 1, 1, 3, 3, 3]]).expand(rows, width).clone()
    turn[1, 3:] = -1
    return {
        "entropy": torch.rand(rows, width, generator=g, dtype=torch.float64),
        "turn_ids": turn,
        "group": [0, 0, 7, 7, 7, 2],
        "response_mask": mask.double(),
        "logp_old": -torch.rand(rows, width, generator=g, dtype=torch.float64) - 0.1,
        "logp_rollout": -torch.rand(rows, width, generator=g, dtype=torch.float64) - 0.1,
    }


def run(d, **parameters):
    return evaluate("selector", "dart", d, parameters)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1), st.sampled_from(["group", "batch"]))
def test_steps_are_kept_as_the_definition_says(seed, share, scope):
    d = data(seed)
    out = run(d, drop_quantile=share, scope=scope)
    steps = {}
    mask = d["response_mask"].bool()
    for b in range(6):
        for s in (0, 1, 3):
            at = mask[b] & (d["turn_ids"][b] == s)
            if at.any():
                steps[b, s] = float(d["entropy"][b][at].mean())
    assert out["step_entropy"].tolist() == pytest.approx(list(steps.values()))
    want = torch.zeros(6, 8)
    for b, g in enumerate(d["group"]):
        pooled = [h for (r, _), h in steps.items() if scope == "batch" or d["group"][r] == g]
        tau = float(torch.quantile(torch.tensor(pooled, dtype=torch.float64), share)) if pooled else NAN
        assert float(out["threshold"][b]) == pytest.approx(tau, nan_ok=True)
        for s in (0, 1, 3):
            if steps.get((b, s), -1) >= tau - 1e-12:
                want[b][mask[b] & (d["turn_ids"][b] == s)] = 1
    assert torch.equal(out["keep"].float(), want)


def test_raising_the_quantile_only_removes_steps_and_a_scale_changes_nothing():
    d = data()
    kept = [run(d, drop_quantile=q)["keep"] for q in (0.0, 0.2, 0.5, 0.9)]
    mask = d["response_mask"].bool() & (d["turn_ids"] >= 0)
    assert torch.equal(kept[0].bool(), mask)
    for wide, narrow in zip(kept, kept[1:], strict=False):
        assert (narrow <= wide).all() and narrow.sum() < wide.sum()
    assert torch.equal(run(d | {"entropy": 7 * d["entropy"]}, drop_quantile=0.5)["keep"], kept[2])


def test_equal_entropies_are_all_kept():
    d = data()
    out = run(d | {"entropy": torch.full((6, 8), 0.3)}, drop_quantile=0.9)
    assert torch.equal(out["keep"].bool(), d["response_mask"].bool() & (d["turn_ids"] >= 0))


def test_the_weight_is_the_ratio_up_to_the_cap_on_kept_tokens():
    d = data()
    out = run(d)
    ratio = (d["logp_old"] - d["logp_rollout"]).exp()
    torch.testing.assert_close(out["weights"], ratio.clamp(max=1.0) * out["keep"])
    torch.testing.assert_close(run(d, cap=1.5)["weights"], ratio.clamp(max=1.5) * out["keep"])
    torch.testing.assert_close(run(d | {"logp_rollout": d["logp_old"]})["weights"], out["keep"].double())


def test_engine_log_probs_that_were_not_recorded_give_weight_one():
    d = data()
    d["logp_rollout"][0] = 0.0
    d["logp_rollout"][2, 1] = NAN
    out = run(d, drop_quantile=0.0)
    torch.testing.assert_close(out["weights"][0], out["keep"][0].double())
    assert out["weights"][2, 1] == out["keep"][2, 1]
    assert (out["weights"][3] < out["keep"][3]).any()


def test_garbage_behind_the_mask_and_a_group_without_steps():
    d = data()
    mask = d["response_mask"].bool()
    dirty = {k: torch.where(mask, d[k], NAN) for k in ("entropy", "logp_old", "logp_rollout")}
    for name, value in run(d | dirty).items():
        torch.testing.assert_close(value, run(d)[name], equal_nan=True)
    alone = run({k: v[4:5] for k, v in d.items()})
    assert torch.isnan(alone["threshold"]).all() and not alone["weights"].any() and not len(alone["step_entropy"])


def test_a_correction_for_the_same_mismatch_is_refused_and_a_mask_is_not():
    d = data()
    part = rlx.create("selector", "dart")
    batch = reward_batch(group=d["group"], response_mask=d["response_mask"]).with_columns(
        **{k: d[k] for k in ("entropy", "turn_ids", "logp_old", "logp_rollout")}
    )
    part(batch.with_columns(correction_weight=d["response_mask"]))
    with pytest.raises(rlx.ConfigError, match=r"set selector dart\.cap to null"):
        part(batch.with_columns(correction_weight=0.9 * d["response_mask"]))
    rlx.create("selector", "dart", cap=None)(batch.with_columns(correction_weight=0.9 * d["response_mask"]))


def test_the_share_of_steps_is_reported():
    d = data()
    batch = reward_batch(group=d["group"], response_mask=d["response_mask"]).with_columns(
        entropy=d["entropy"], turn_ids=d["turn_ids"]
    )
    found = rlx.create("selector", "dart", cap=None, drop_quantile=0.5, pool="batch")(batch)
    assert 0.5 <= found["kept_steps"] < 0.6
