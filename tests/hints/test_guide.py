"""Guide: when hints are given, what the guided rows look like, and the ratio that learns from them."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.core.host import CAPABILITIES
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.correction_guide import guide as guided_ratio
from rlx_plugins.testing.scripted import ScriptedExecutor

HOST = rlx.HostProfile("any", frozenset({"logp_old", "logp_rollout"}), frozenset(CAPABILITIES))


def guide(rewards, group, guided_rewards=None, has_hint=None, k_guided=2, **params):
    has_hint = {str(g): True for g in group} if has_hint is None else has_hint
    inputs = {"rewards": rewards, "group": group, "k_guided": k_guided, "has_hint": has_hint}
    return evaluate("hint", "guide", inputs | {"guided_rewards": guided_rewards}, params)


def run(part, reward, hint=(8, 9), logp=-1.0, forward=None):
    ctx = rlx.Context(0, 9, 1, 4, 8, {"p0": [1, 2]}, ["p0"], columns=lambda key: {"hint": list(hint)})
    executor = ScriptedExecutor(reward, length=2, logp=logp, forward=forward)
    ready = rlx.drive(rlx.rollout_program(rlx.Parts({"hint": [part]}), ctx), executor)
    return ready[0], executor


def solved_with_help(r):
    return float(r.helped)


def test_any_success_means_no_guidance_and_plain_grpo():
    out = guide([1, 0, 0, 0], [3, 3, 3, 3], {"3": [1, 1]})
    grpo = evaluate("advantage", "grpo", {"rewards": [1, 0, 0, 0], "group": [3, 3, 3, 3]})
    assert (out["need_guidance"], out["extra_rollouts"], out["adv_guided"]) == ([], 0, {})
    assert torch.allclose(out["adv_unguided"], grpo["advantages"])


def test_triggered_groups_come_in_ascending_order_with_k_extra_rollouts_each():
    out = guide([0, 0, 0, 0, 1, 0], [12, 12, 5, 5, 7, 7], k_guided=3)
    assert (out["need_guidance"], out["extra_rollouts"]) == ([5, 12], 6)


@pytest.mark.parametrize(
    ("rewards", "has_hint"), [([math.nan, math.nan], True), ([0, 0], False)], ids=["nothing scorable", "no hint"]
)
def test_no_guidance(rewards, has_hint):
    out = guide(rewards, [0, 0], {"0": [1, 0]}, {"0": has_hint})
    assert (out["need_guidance"], out["adv_guided"]) == ([], {})
    assert out["adv_unguided"].tolist() == [0, 0]


def test_appended_advantages_sum_to_zero_over_both_kinds_of_rows():
    out = guide([0, -1, 0], [0, 0, 0], {"0": [1, 0]})
    assert float(out["adv_unguided"].sum()) + sum(out["adv_guided"]["0"]) == pytest.approx(0)


def test_without_guided_rewards_the_plain_group_stands_alone():
    for mode in ("append", "replace"):
        out = guide([0, -1], [0, 0], mode=mode)
        assert out["adv_unguided"].tolist() == pytest.approx([0.707106, -0.707106], abs=1e-6)


def test_guided_failures_leave_every_advantage_zero():
    for mode in ("append", "replace"):
        out = guide([0, 0], [0, 0], {"0": [0, 0]}, mode=mode)
        assert out["adv_unguided"].tolist() == [0, 0] and out["adv_guided"] == {"0": [0, 0]}


def test_a_group_of_one_failure_gets_its_baseline_from_the_guided_rollouts():
    out = guide([0], [0], {"0": [1, 1]}, std=False)
    assert out["adv_unguided"].tolist() == pytest.approx([-2 / 3])
    assert out["adv_guided"]["0"] == pytest.approx([1 / 3, 1 / 3])


def test_guided_rows_are_sampled_with_the_hint_and_trained_without_it():
    group, executor = run(rlx.create("hint", "guide"), solved_with_help)
    guided = [r for r in group.rollouts if r.tag == "guided"]
    assert [len(rows) for rows in executor.launched] == [4, 2]
    assert all(r.context == [8, 9] and r.prompt == [1, 2] and r.tokens == [1, 1] for r in guided)
    assert rlx.pack([group]).source == ["fresh"] * 4 + ["guided"] * 2


def test_hints_are_tried_once():
    group, executor = run(rlx.create("hint", "guide"), lambda r: 0.0)
    assert len(group.rollouts) == 6 and len(executor.launched) == 2


def test_guided_rows_carry_the_log_probs_under_the_hint_and_plain_rows_none():
    group, _ = run(rlx.create("hint", "guide"), solved_with_help, logp=-0.25)
    behavior = rlx.pack([group]).logp_behavior
    assert behavior[:4].isnan().all()
    assert behavior[4:].tolist() == [[-0.25, -0.25]] * 2


def test_a_forward_pass_replaces_what_the_engine_does_not_report():
    asked = []

    def forward(operation):
        asked.extend(operation.rollouts)
        return [[-0.5, -0.75] for _ in operation.rollouts]

    part = rlx.create("hint", "guide", behavior_logp="forward")
    group, _ = run(part, solved_with_help, logp=None, forward=forward)
    assert [r.context for r in asked] == [[8, 9]] * 2
    assert rlx.pack([group]).logp_behavior[4:].tolist() == [[-0.5, -0.75]] * 2


def test_tool_output_within_a_guided_row_keeps_every_segment_at_its_own_log_probs():
    part = rlx.create("hint", "guide")
    segments = [rlx.Segment([1, 2], logp=[-0.1, -0.2]), rlx.Segment([3], "tool"), rlx.Segment([4], logp=[-0.4])]
    row = rlx.Rollout("p0", "g", 0, [1], context=[8], segments=segments, state="finished", tag="guided")
    rlx.drive(part.annotate([rlx.Group("g", "p0", [1], rollouts=[row])], None), None)
    assert [s.logp_behavior for s in row.segments] == [[-0.1, -0.2], None, [-0.4]]


def test_log_probs_under_the_hint_are_recorded_once():
    group, _ = run(rlx.create("hint", "guide"), solved_with_help, logp=-0.25)
    group.rollouts[-1].segments[0].logp = [-9.0, -9.0]
    rlx.drive(rlx.create("hint", "guide").annotate([group], None), None)
    assert group.rollouts[-1].segments[0].logp_behavior == [-0.25, -0.25]


def test_an_engine_without_log_probs_is_an_error_that_names_the_remedy():
    with pytest.raises(rlx.DataError, match="behavior_logp=forward"):
        run(rlx.create("hint", "guide"), solved_with_help, logp=None)
    blind = rlx.HostProfile("blind", frozenset({"logp_old"}), frozenset(CAPABILITIES))
    with pytest.raises(rlx.ConfigError, match="'logp_rollout'"):
        rlx.build({"hint": "guide"}, blind)
    rlx.build({"hint": {"name": "guide", "behavior_logp": "forward"}}, blind)


def test_replaced_rows_leave_the_batch():
    group, _ = run(rlx.create("hint", "guide", mode="replace"), solved_with_help)
    assert [r.keep for r in group.rollouts] == [False] * 4 + [True] * 2


def test_a_hint_that_does_not_fit_is_no_hint():
    group, _ = run(rlx.create("hint", "guide", max_prompt_tokens=3), lambda r: 0.0)
    assert len(group.rollouts) == 4


def test_a_missing_column_is_named():
    part = rlx.create("hint", "guide", column="advice")
    assert part.token_columns == {"advice"}
    with pytest.raises(rlx.ConfigError, match="'advice'"):
        run(part, lambda r: 0.0)


# ---- the ratio -------------------------------------------------------------------------------------------------


def row(*values):
    return [list(values)]


def test_the_method_divides_by_the_hinted_policy_and_a_batch_without_hints_is_ppo():
    parts = rlx.build({"method": "guide"}, HOST)
    assert (parts.one("hint").name, parts.one("ratio").denominator) == ("guide", "logp_behavior")
    plain = rlx.build({}, HOST)
    batch = rlx.RolloutBatch(
        {
            "group": torch.tensor([0, 0]),
            "response_mask": torch.ones(2, 2, dtype=torch.bool),
            "rewards": torch.tensor([1.0, 0.0], dtype=torch.float64),
            "keep": torch.tensor([True, True]),
            "logp_old": torch.tensor([[-1.0, -2.0], [-0.5, -1.0]], dtype=torch.float64),
        }
    )
    logp = torch.tensor([[-0.7, -2.1], [-0.6, -0.8]], dtype=torch.float64)
    losses = [
        rlx.policy_loss(p, rlx.prepare(p, batch).batch, logp, totals={"policy": torch.tensor(4.0)})[0]
        for p in (parts, plain)
    ]
    assert losses[0] == losses[1] != 0


def test_unguided_rows_are_ppo_whatever_the_hinted_log_probs():
    arguments = {
        "logp_new": row(-1.1, -0.3),
        "logp_old": row(-1.2, -1.0),
        "response_mask": row(1, 1),
        "advantages": [1.0],
    }
    a = guided_ratio(**arguments, logp_behaviour_hint=row(-9.0, 4.0), guided=[False])
    b = guided_ratio(**arguments, logp_behaviour_hint=row(-1.2, -1.0), guided=[True])
    assert a["loss"] == b["loss"] == pytest.approx((-math.exp(0.1) - 1.2) / 2)
    assert torch.equal(a["grad_logp"], b["grad_logp"])
    assert (a["guided_clip_frac"], b["guided_clip_frac"]) == (0.0, 0.5)


def test_a_clipped_guided_token_and_one_beyond_the_clamp_get_no_gradient():
    out = guided_ratio(
        row(-0.1, -math.inf, -1.0), row(-0.1, -1.0, -1.0), row(-1.0, -1.0, -0.9), [True], row(1, 1, 1), [1.0]
    )
    assert out["grad_logp"][0].tolist() == pytest.approx([0.0, 0.0, -math.exp(-0.1) / 3])
    assert out["ratio"][0, 1] == pytest.approx(math.exp(-20))


def test_garbage_under_the_mask_touches_neither_loss_nor_gradient():
    clean = guided_ratio(row(-1.0, 0.0), row(-1.1, 0.0), row(-0.7, 0.0), [True], row(1, 0), [0.5])
    dirty = guided_ratio(row(-1.0, math.nan), row(-1.1, math.nan), row(-0.7, math.inf), [True], row(1, 0), [0.5])
    assert clean["loss"] == dirty["loss"]
    assert torch.equal(clean["grad_logp"], dirty["grad_logp"])


def test_a_fully_masked_batch_has_loss_zero():
    out = guided_ratio(row(-1.0), row(-1.0), row(-1.0), [True], row(0), [1.0])
    assert (out["loss"], out["guided_clip_frac"]) == (0.0, 0.0)


def test_the_ratio_is_unbiased_under_the_hinted_policy():
    target = torch.log_softmax(torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64), 0)
    hinted = torch.log_softmax(torch.tensor([1.3, 0.0, -0.8, 0.4], dtype=torch.float64), 0)
    ones = [[1.0]] * 4
    out = guided_ratio(target[:, None], target[:, None], hinted[:, None], [True] * 4, ones, [1.0] * 4)
    assert float((hinted.exp() * out["ratio"][:, 0]).sum()) == pytest.approx(1)
