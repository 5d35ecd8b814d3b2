"""Rollout replay: the buffer, what a replayed row carries, and the clip around the step's first ratio."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.core.host import CAPABILITIES
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.scripted import ScriptedExecutor

KEYS = [f"p{i}" for i in range(8)]
HOST = rlx.HostProfile("any", frozenset({"logp_old", "logp_rollout", "logp_behavior"}), frozenset(CAPABILITIES))


def step(buffer, fresh, perm, batch_groups, **params):
    inputs = {"op": "step", "buffer": buffer, "fresh": fresh, "perm": perm, "batch_groups": batch_groups}
    return evaluate("replay", "rollout_replay", inputs, params)


def run(part, number, groups=4, logp=-1.0, reward=lambda r: float(r.slot % 2)):
    """One step of the program; the host offers the prompts in turn."""
    offered = [KEYS[(number * groups + i) % len(KEYS)] for i in range(groups)]
    ctx = rlx.Context(number, 9, groups, 2, 4, {k: [1] for k in KEYS}, offered, version=number)
    executor = ScriptedExecutor(reward, length=2, logp=logp, version=number)
    return rlx.drive(rlx.rollout_program(rlx.Parts({"replay": [part]}), ctx), executor), ctx


def replayed(groups):
    return [g.prompt_key for g in groups if not g.fresh]


# ---- the buffer ------------------------------------------------------------------------------------------------


def test_a_share_of_one_never_replays():
    out = step([["a", 0.5]], [["b", 0.5]], [0], 4, sigma=1)
    assert (out["replay_ids"], out["short"], out["buffer_ids"]) == ([], 0, ["a", "b"])


def test_the_first_epoch_replays_nothing_and_keeps_room_for_a_whole_batch():
    out = step([[k, 0.5] for k in "abc"], [[k, 0.5] for k in "wxyz"], [0, 1, 2], 4, capacity=5, first=True)
    assert (out["replay_ids"], out["buffer_ids"]) == ([], ["c", *"wxyz"])


def test_a_short_buffer_is_reported_and_not_topped_up():
    out = step([["a", 0.5], ["a", 0.25]], [["b", 0.5], ["c", 0.5]], [0, 1], 8)
    assert (out["replay_ids"], out["short"]) == (["a"], 3)


def test_a_share_that_makes_whole_groups_makes_them_free_of_rounding():
    # 1 - 0.8 is a little less than 0.2.
    buffer, fresh = [[f"b{i}", 0.5] for i in range(9)], [[f"f{i}", 0.5] for i in range(8)]
    out = step(buffer, fresh, range(9), 10, sigma=0.8, capacity=12)
    assert out["replay_ids"] == ["b0", "b1"] and out["short"] == 0
    assert out["buffer_ids"][:4] == ["b5", "b6", "b7", "b8"] and len(out["buffer_ids"]) == 12


def test_without_room_only_the_fresh_groups_are_stored():
    out = step([["a", 0.5]], [["b", 0.5], ["c", 0.5]], [0], 4, capacity=2)
    assert (out["replay_ids"], out["buffer_ids"]) == (["a"], ["b", "c"])


def test_the_buffer_stays_within_its_capacity_and_replays_distinct_prompts_of_earlier_steps():
    part = rlx.create("replay", "rollout_replay", capacity=5)
    for number in range(8):
        ready, ctx = run(part, number)
        old = replayed(ready)
        assert len(part.buffer) <= 5
        assert len(ready) == 4 and len(old) == len(set(old)) == (0 if number < 2 else 2)
        assert not {g.id for g in ready if not g.fresh} & {g.id for g in ctx.started}


def test_a_replayed_row_keeps_its_log_probs_and_counts_as_stale():
    part = rlx.create("replay", "rollout_replay")
    for number, logp in enumerate((-0.5, -0.7)):
        run(part, number, logp=logp)
    ready, _ = run(part, 2, logp=-0.1)
    batch = rlx.pack(ready, version=2)
    for row, rollout in enumerate(batch.rollout):
        sampled = rollout.segments[0].version
        assert batch.logp_rollout[row].tolist() == pytest.approx([(-0.5, -0.7, -0.1)[sampled]] * 2)
        assert batch.staleness[row].tolist() == [2 - sampled] * 2
    assert batch.source.count("replayed") == 4


def test_degenerate_and_unscorable_groups_and_forgotten_prompts_are_not_replayed():
    rewards = {"p0": [1, 1], "p1": [0, 0], "p2": [math.nan, math.nan], "p3": [1, math.nan], "p4": [1, 0]}
    part = rlx.create("replay", "rollout_replay", fresh_share=0.1)
    run(part, 0, groups=8, reward=lambda r: float(rewards.get(r.prompt_key, [1, 0])[r.slot]))
    ctx = rlx.Context(1, 9, 8, 2, 4, {k: [1] for k in KEYS if k != "p7"}, [])
    groups, _ = part.intake(8, ctx)
    assert [g.prompt_key for g in groups] == ["p4", "p5", "p6"]


def test_where_the_engine_reports_no_log_probs_the_trainers_are_stored():
    part = rlx.create("replay", "rollout_replay", fresh_share=0.5)
    ready, ctx = run(part, 0, groups=8, logp=None)
    batch = rlx.pack(ready)
    batch = batch.with_columns(logp_old=-torch.arange(32.0).view(16, 2))
    part.feedback(batch, ctx)
    late, _ = run(part, 1, groups=8, logp=None)
    again = [r for g in late if not g.fresh for r in g.rollouts]
    first = {(r.group, r.slot): row for row, r in enumerate(batch.rollout)}
    assert len(again) == 8
    assert all(r.segments[0].logp == batch.logp_old[first[r.group, r.slot]].tolist() for r in again)


def test_a_group_without_any_log_probs_is_dropped():
    part = rlx.create("replay", "rollout_replay")
    run(part, 0, groups=8, logp=None)
    assert replayed(run(part, 1, groups=8)[0]) == []


def test_controllers_are_not_told_replayed_groups():
    part = rlx.create("replay", "rollout_replay")
    for number in range(4):
        run(part, number)
    assert part.rolled_out == 4 + 4 + 2 + 2


def test_a_restored_replay_draws_what_the_saved_one_draws():
    saved = rlx.create("replay", "rollout_replay")
    for number in range(3):
        run(saved, number)
    restored = rlx.create("replay", "rollout_replay")
    restored.load_state_dict(saved.state_dict())
    for number in range(3, 6):
        a, b = run(saved, number)[0], run(restored, number)[0]
        assert [g.to_plain() for g in a] == [g.to_plain() for g in b]
    assert saved.state_dict() == restored.state_dict()


# ---- the clip --------------------------------------------------------------------------------------------------


def loss(**arguments):
    return evaluate("replay", "rollout_replay", {"op": "loss", **arguments})


BATCH = {
    "rewards": [1, 0, 0.5],
    "group": [0, 0, 0],
    "response_mask": [[1, 1], [1, 1], [1, 0]],
    "logp_new": [[-0.5, -2.5], [-0.4, -1.0], [-1.0, -1.0]],
    "logp_prox": [[-1.0, -1.2], [-1.0, -1.0], [-0.7, -1.0]],
}


def test_fresh_rows_alone_are_ppo():
    out = loss(**BATCH, logp_behaviour=BATCH["logp_prox"])
    ratio = (torch.tensor(BATCH["logp_new"]).double() - torch.tensor(BATCH["logp_prox"]).double()).exp()
    adv, mask = out["advantages"][:, None], torch.tensor(BATCH["response_mask"]).bool()
    expected = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.2))
    assert torch.allclose(out["token_loss"][mask], expected[mask])
    assert out["loss"] == pytest.approx(float(expected[mask].mean()))


def test_at_the_start_of_a_step_nothing_is_clipped_however_old_the_row():
    behaviour = [[-3.0, -0.1], [-0.2, -4.0], [-2.0, -1.0]]
    out = loss(**{**BATCH, "logp_new": BATCH["logp_prox"]}, logp_behaviour=behaviour)
    mask = torch.tensor(BATCH["response_mask"]).bool()
    centre = (torch.tensor(BATCH["logp_prox"]).double() - torch.tensor(behaviour).double()).exp()
    expected = torch.where(mask, -out["advantages"][:, None] * centre / mask.sum(), 0.0)
    assert out["clip_frac"] == 0
    assert torch.allclose(out["grad_logp"], expected)


def test_a_group_of_one_and_a_masked_row_contribute_nothing_but_the_latter_its_reward():
    rows = {name: value[:2] for name, value in BATCH.items()}
    alone = loss(**{**rows, "group": [0, 1]}, logp_behaviour=rows["logp_prox"])
    assert alone["loss"] == 0
    masked = loss(**{**rows, "response_mask": [[1, 1], [0, 0]]}, logp_behaviour=rows["logp_prox"])
    assert masked["advantages"].tolist() == pytest.approx([0.707106, -0.707106], abs=1e-6)
    assert masked["token_loss"][1].tolist() == [0, 0] and masked["loss"] != 0


def test_no_token_at_all_is_loss_zero():
    out = loss(**{**BATCH, "response_mask": [[0, 0]] * 3}, logp_behaviour=BATCH["logp_prox"])
    assert (out["loss"], out["clip_frac"]) == (0, 0)


def test_garbage_under_the_mask_touches_neither_loss_nor_gradient():
    clean = loss(**BATCH, logp_behaviour=BATCH["logp_prox"])
    dirt = {name: [row[:] for row in BATCH[name]] for name in ("logp_new", "logp_prox")}
    for name in dirt:
        dirt[name][2][1] = math.nan
    dirty = loss(**{**BATCH, **dirt}, logp_behaviour=[*BATCH["logp_prox"][:2], [-0.7, math.inf]])
    assert clean["loss"] == dirty["loss"]
    assert torch.equal(clean["grad_logp"], dirty["grad_logp"])


def test_an_unknown_sampling_log_prob_makes_the_token_ppos():
    unknown = [[math.nan, -1.2], [-1.0, math.nan], [-0.7, -1.0]]
    assert loss(**BATCH, logp_behaviour=unknown)["loss"] == loss(**BATCH, logp_behaviour=BATCH["logp_prox"])["loss"]


def test_the_method_names_replay_and_clip_and_the_clip_refuses_a_second_ratio():
    parts = rlx.build({"method": {"name": "rollout_replay", "fresh_share": 0.25, "eps_high": 0.3}}, HOST)
    assert (parts["replay"][0].fresh_share, parts.one("clip").eps_high) == (0.25, 0.3)
    with pytest.raises(rlx.ConfigError, match="does the work of a ratio itself"):
        rlx.build({"method": "rollout_replay", "ratio": "sequence"}, HOST)


def test_a_correction_for_the_mismatch_the_clip_already_divides_by_is_refused():
    with pytest.raises(rlx.ConfigError, match="the mismatch would count twice; use clip.denominator"):
        rlx.build({"method": "rollout_replay", "correction": "tis"}, HOST)
