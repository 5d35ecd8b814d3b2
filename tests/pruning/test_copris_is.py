"""CoPRIS's stitched log-probs: every token keeps those of the stage that wrote it."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.core.trajectory import Group, Segment
from rlx_plugins.hosts.table import TableHost, TableTrainer
from rlx_plugins.pruning.copris_is import record_stage, unscored
from rlx_plugins.testing import evaluate

NAN = math.nan


def stages(seed=0):
    """Three stages of three rows: grown in every stage, in the first only, never."""
    g = torch.Generator().manual_seed(seed)
    logps = -torch.rand(3, 3, 6, generator=g, dtype=torch.float64) - 0.1
    return {
        "stage_logps": logps,
        "stage_lengths": [[2, 3, 0], [2, 3, 0], [6, 3, 0]],
        "logp_new": logps[2] + 0.3 * torch.randn(3, 6, generator=g, dtype=torch.float64),
        "advantages": torch.tensor([1.0, -1.0, 2.0]).double(),
        "response_mask": (torch.arange(6) < torch.tensor([6, 3, 0])[:, None]).double(),
    }


def run(d, **parameters):
    return evaluate("correction", "copris_is", d, parameters)


def test_tokens_keep_the_log_probs_of_the_stage_that_wrote_them():
    d = stages()
    out = run(d)
    logps = d["stage_logps"]
    assert out["stage"].tolist() == [[0, 0, 2, 2, 2, 2], [0, 0, 0, -1, -1, -1], [-1] * 6]
    torch.testing.assert_close(out["logp_old"][0], torch.cat([logps[0, 0, :2], logps[2, 0, 2:]]))
    torch.testing.assert_close(out["logp_old"][1, :3], logps[0, 1, :3])
    assert not out["logp_old"][1, 3:].any() and not out["logp_old"][2].any()


def test_what_later_stages_say_about_earlier_tokens_has_no_effect():
    d = stages()
    other = d["stage_logps"].clone()
    other[1:, 0, :2], other[1:, 1], other[1] = -7.0, -8.0, -9.0
    for name, value in run(d | {"stage_logps": other}).items():
        torch.testing.assert_close(value, run(d)[name])


def test_one_stage_is_ppo():
    d = stages()
    one = d | {"stage_logps": d["stage_logps"][:1], "stage_lengths": [[6, 3, 0]]}
    base = {"logp_new": d["logp_new"], "logp_old": d["stage_logps"][0], "advantages": d["advantages"]}
    ppo = evaluate(
        "clip",
        "baselines",
        base | {"response_mask": d["response_mask"]},
        {"loss": "vanilla", "eps_low": 0.2, "eps_high": 0.28, "dual_clip": 10.0},
    )
    for name in ("loss", "grad_logp"):
        torch.testing.assert_close(run(one)[name], ppo[name])


def test_at_the_stitched_policy_the_gradient_is_the_plain_one():
    d = stages()
    out = run(d | {"logp_new": run(d)["logp_old"]})
    want = -d["advantages"][:, None] * d["response_mask"] / d["response_mask"].sum()
    torch.testing.assert_close(out["grad_logp"], want)


def test_garbage_behind_the_mask_touches_nothing():
    d = stages()
    dirty = {"logp_new": torch.where(d["response_mask"].bool(), d["logp_new"], NAN)}
    for name in ("loss", "grad_logp"):
        torch.testing.assert_close(run(d | dirty)[name], run(d)[name])


def test_only_model_tokens_without_a_log_prob_are_recorded():
    (r,) = Group("g", "p", [1]).start(1)
    r.segments = [
        Segment([1, 2], logp_behavior=[-0.1, NAN]),
        Segment([3], "tool"),
        Segment([4], "reused"),
        Segment([5, 6]),
    ]
    assert unscored(r)
    record_stage(r, [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])
    assert [s.logp_behavior for s in r.segments] == [[-0.1, -2.0], None, [-4.0], [-5.0, -6.0]]
    assert not unscored(r)


def test_in_a_run_continued_rows_divide_by_the_policy_of_their_stage():
    host = TableHost(12, resolution=0.0)
    trainer = TableTrainer(
        {"method": "copris_is"}, host=host, groups=2, group_size=4, max_tokens=24, total_steps=8, learning_rate=0.3
    )
    checked = 0
    for _ in range(8):
        ctx = trainer.context()
        batch = trainer.rollouts(ctx)
        stale = batch.response_mask & (batch.staleness > 0)
        if batch.has("logp_behavior"):
            recorded = batch.response_mask & ~torch.isnan(batch.logp_behavior)
            assert torch.equal(recorded, stale), "the last stage's tokens take the step's logp_old"
            # exact weights and a synchronous engine: the trainer's numbers of the stage are the engine's
            torch.testing.assert_close(batch.logp_behavior[stale], batch.logp_rollout[stale])
            moved = (batch.logp_behavior - batch.logp_old)[stale].abs()
            checked += int((moved > 1e-3).sum())
        trainer.update(rlx.prepare(trainer.parts, batch))
        trainer.step += 1
        trainer.offered += len(ctx.started)
    assert checked > 0


def test_a_ratio_over_the_recorded_log_probs_needs_a_host_that_scores_during_the_rollout():
    with pytest.raises(rlx.ConfigError, match="forward:logp"):
        rlx.build({"pruner": "copris_is"}, rlx.HostProfile("any", frozenset({"logp_old"})))
