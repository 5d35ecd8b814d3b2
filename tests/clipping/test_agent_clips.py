"""The clips of A2TGPO, ELPO, ECHO and SAO: neutral settings, bounds, gradients, and garbage under the mask."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import run_loss

MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
ADVANTAGES = [1.2, -0.8, 0.5, -1.5]
TURNS = torch.tensor([[0, 0, 1, 1, 2], [0, -1, 1, 1, -1], [-1] * 5, [0, 1, 1, 2, 2]])


def columns(seed=0):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(4, 5, generator=g, dtype=torch.float64) - 0.1
    new = old + 0.4 * torch.randn(4, 5, generator=g, dtype=torch.float64)
    return {
        "logp_new": new,
        "logp_old": old,
        "logp_rollout": old + 0.1 * torch.randn(4, 5, generator=g, dtype=torch.float64),
        "advantages": ADVANTAGES,
        "response_mask": MASK,
        "turn_ids": TURNS,
        "norm_ig": torch.randn(4, 5, generator=g, dtype=torch.float64),
        "critical_turn": torch.tensor([1.0, 1.0, 0.0, -1.0]),
        "rewards": torch.tensor([1.0, 0.0, 0.0, 0.0]),
        "confidence": torch.rand(4, 5, generator=g, dtype=torch.float64),
    }


def loss(clip, ratio=None, given=None, **changes):
    parts = {"clip": rlx.create("clip", clip.pop("name"), **clip)} | (
        {"ratio": rlx.create("ratio", ratio)} if ratio else {}
    )
    return run_loss(parts, **{**(given or columns()), **changes})


def ppo(ratio="token", given=None, **parameters):
    return loss({"name": "ppo", **parameters}, ratio, given)


def same(a, b):
    for name in ("loss", "per_token_loss", "grad_logp"):
        torch.testing.assert_close(a[name], b[name])


CLIPS = {"a2tgpo": "turn", "elpo": "token", "echo": "token", "sao": None}


@pytest.mark.parametrize("name", CLIPS)
def test_garbage_under_the_mask_reaches_neither_value_nor_gradient(name):
    given = columns(1)
    nan = torch.where(MASK.bool(), 0.0, torch.nan)
    dirty = {k: given[k] + nan for k in ("logp_new", "logp_old", "logp_rollout", "norm_ig", "confidence")}
    same(loss({"name": name}, CLIPS[name], {**given, **dirty}), loss({"name": name}, CLIPS[name], given))


@pytest.mark.parametrize("name", CLIPS)
def test_on_policy_nothing_is_clipped_and_the_gradient_is_minus_the_advantage(name):
    given = columns(2)
    given["logp_new"] = given["logp_rollout"] = given["logp_old"]
    out = loss({"name": name}, CLIPS[name], given)
    want = -torch.tensor(ADVANTAGES)[:, None] * MASK / MASK.sum()
    if name == "a2tgpo":  # the gradient of a turn's mean: equal advantages within the row give back the same
        assert out["clipped"] == 0
    torch.testing.assert_close(out["grad_logp"], want.double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", CLIPS)
def test_the_loss_never_waits_for_the_device(name):
    given = {k: torch.as_tensor(v).to("meta") for k, v in columns().items()}
    batch = rlx.RolloutBatch({**given, "response_mask": given["response_mask"].bool(), "group": torch.arange(4)})
    terms = rlx.PolicyTerms(given["logp_new"], batch, advantages=given["advantages"][:, None].expand(4, 5))
    terms.ratio = rlx.create("ratio", "token")(terms)
    token_loss, metrics = rlx.create("clip", name)(terms)
    assert token_loss.is_meta and all(m.is_meta and m.ndim == 0 for m in metrics.values())


@pytest.mark.parametrize("name", CLIPS)
def test_no_live_token_gives_loss_zero(name):
    out = loss({"name": name}, CLIPS[name], response_mask=torch.zeros(4, 5))
    assert out["loss"] == 0 and not out["grad_logp"].any()


# ---- A2TGPO --------------------------------------------------------------------------------------------------------


def test_a2tgpo_without_gain_scale_is_ppo_on_its_ratio():
    same(loss({"name": "a2tgpo", "gain_scale": 0.0}, "turn"), ppo("turn"))
    same(loss({"name": "a2tgpo", "gain_scale": 0.0, "level": "token", "dual_clip": 3.0}), ppo(dual_clip=3.0))


def test_a2tgpo_the_half_width_follows_the_gain_within_its_bounds():
    clip = rlx.create("clip", "a2tgpo")
    scale = clip.scale(torch.tensor([-50.0, -1.0, 0.0, torch.nan, 1.0, 50.0], dtype=torch.float64))
    assert scale.tolist() == pytest.approx([0.7, 1 - 0.3 * math.tanh(0.5), 1, 1, 1 + 0.3 * math.tanh(0.5), 1.3])


def test_a2tgpo_a_gain_moves_the_point_where_a_token_stops():
    base = {"logp_old": [[0.0]], "response_mask": [[1]], "turn_ids": [[0]]}

    def gradient(ratio, advantage, gain):
        given = {**base, "logp_new": [[math.log(ratio)]], "advantages": [advantage], "norm_ig": [[gain]]}
        return float(evaluate("clip", "a2tgpo", given)["grad_logp"][0, 0])

    assert gradient(1.22, 1.0, 0.0) == 0 and gradient(1.22, 1.0, 3.0) == pytest.approx(-1.22)
    assert gradient(0.83, -1.0, 0.0) == pytest.approx(0.83) and gradient(0.83, -1.0, -3.0) == 0


def test_a2tgpo_missing_gains_are_plain_and_the_dual_clip_bounds_the_loss():
    given = {k: columns(3)[k] for k in ("logp_new", "logp_old", "advantages", "response_mask", "turn_ids")}
    out = evaluate("clip", "a2tgpo", {**given, "norm_ig": None})
    same(out, ppo("turn", columns(3)))
    given["logp_new"] = given["logp_old"] + 3
    capped = evaluate("clip", "a2tgpo", {**given, "norm_ig": [[None]] * 4}, {"clip_ratio_c": 2.0})
    assert capped["token_loss"][3].tolist() == pytest.approx([3.0] * 5) and capped["eps_low"].eq(0.2).all()


HOST = rlx.HostProfile("any", frozenset("logp_old logp_rollout turn_ids info_gain critical_turn values".split()))


def test_the_methods_put_their_parts_together():
    parts = rlx.build({"method": {"name": "a2tgpo", "gain_scale": 0.1, "gain_coef": 0.5}}, HOST)
    assert (parts.one("ratio").name, parts.one("clip").gain_scale, parts.one("advantage").gain_coef) == (
        "turn",
        0.1,
        0.5,
    )
    with pytest.raises(rlx.ConfigError, match="clip a2tgpo works with ratio=turn only"):
        rlx.build({"method": "a2tgpo", "ratio": "token"}, HOST)
    parts = rlx.build({"method": {"name": "sao", "eps_high": 3.0}}, HOST)
    assert (parts.one("advantage").name, parts.one("clip").eps_high) == ("sao", 3.0)
    parts = rlx.build({"method": {"name": "elpo", "extra": 0.2, "tree": "column"}}, HOST_WITH_TREE)
    assert (parts.one("advantage").tree, parts.one("clip").extra) == ("column", 0.2)
    parts = rlx.build({"method": {"name": "datpo", "tree": "column", "eps_high": 0.3}}, HOST_WITH_TREE)
    assert (parts.one("aggregate").name, parts.one("clip").eps_high) == ("datpo", 0.3)


HOST_WITH_TREE = rlx.HostProfile("any", HOST.signals | {"node_ids", "node_path", "block_embedding"})

# ---- ELPO ----------------------------------------------------------------------------------------------------------


def test_elpo_without_extra_or_critical_step_is_the_asymmetric_clip():
    same(loss({"name": "elpo", "extra": 0.0}), ppo(eps_high=0.315))
    same(loss({"name": "elpo"}, critical_turn=torch.tensor([-1.0, torch.nan, -1.0, -1.0])), ppo(eps_high=0.315))


def test_elpo_marks_the_critical_step_and_all_after_it_in_failed_rollouts_only():
    clip, given = rlx.create("clip", "elpo"), columns()
    batch = rlx.RolloutBatch({k: v for k, v in given.items() if k != "advantages"})
    assert clip.critical(batch).int().tolist() == [[0] * 5, [0, 0, 1, 1, 0], [0] * 5, [0] * 5]


def test_elpo_a_critical_token_keeps_its_gradient_where_others_are_stopped():
    given = {
        "logp_old": [[0.0] * 4],
        "logp_new": [[math.log(0.75)] * 2 + [math.log(0.6)] * 2],
        "response_mask": [[1] * 4],
    }
    out = evaluate("clip", "elpo", {**given, "advantages": [-1.0], "critical_mask": [[0, 1, 0, 1]]})
    assert out["grad_logp"].tolist() == [[0, pytest.approx(0.75 / 4), 0, 0]] and out["clip_fraction"] == 0.75
    up = evaluate("clip", "elpo", {**given, "advantages": [1.0], "critical_mask": [[0, 1, 0, 1]]})
    assert up["grad_logp"].tolist()[0] == pytest.approx([-0.75 / 4] * 2 + [-0.6 / 4] * 2), (
        "the wider bound has no effect"
    )


def test_elpo_more_extra_never_raises_a_loss_and_stops_at_zero():
    given = columns(4)
    given |= {"critical_turn": torch.zeros(4), "rewards": torch.zeros(4)}
    losses = [loss({"name": "elpo", "extra": e}, None, given)["per_token_loss"] for e in (0.0, 0.1, 0.5, 0.8, 2.0)]
    assert all((b <= a + 1e-12).all() for a, b in zip(losses, losses[1:])) and (losses[1] < losses[0]).any()
    assert torch.equal(losses[3], losses[4])
    falling = (torch.tensor(ADVANTAGES)[:, None] < 0) & (given["logp_new"] < given["logp_old"])
    assert torch.equal(losses[0][~falling], losses[4][~falling])


# ---- ECHO ----------------------------------------------------------------------------------------------------------


def test_echo_with_one_width_is_ppo_with_verls_dual_clip():
    same(loss({"name": "echo", "eps_min": 0.2, "eps_max": 0.2}), ppo(dual_clip=3.0))


def test_echo_a_confident_end_is_held_tighter_and_the_middle_is_the_floor():
    confidence = [[0.0] * 3, [0.5] * 3, [1.0] * 3, [9.0] * 3, [None] * 3]
    out = evaluate("clip", "echo", {"confidence": confidence, "response_mask": [[1] * 3] * 5})
    wide = 0.05 + 0.15 / (1 + math.exp(-4))
    middle = 0.05 + 0.15 / (1 + math.exp(-2))
    assert out["clip_epsilon"].tolist() == pytest.approx([wide, middle, 0.125, 0.125, wide])


def test_echo_the_window_is_of_model_tokens_and_what_is_before_it_has_no_influence():
    mask = [[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    confidence = [[0.9, 0.2, 5, 0.4, 5], [0.7, 5, 5, 5, 5], [0.1, 0.2, 0.3, 0.4, 0.6]]
    inputs = {"confidence": confidence, "response_mask": mask}
    two = evaluate("clip", "echo", inputs, {"tail_window": 2})["tail_confidence"]
    assert two.tolist() == pytest.approx([0.3, 0.7, 0.5])
    for window in (0, -3):
        everything = evaluate("clip", "echo", inputs, {"tail_window": window})["tail_confidence"]
        assert everything.tolist() == pytest.approx([0.5, 0.7, 0.32])


def test_echo_the_width_of_a_row_is_where_its_tokens_stop():
    given = {"logp_old": [[0.0] * 2] * 2, "logp_new": [[math.log(1.15)] * 2] * 2, "advantages": [1.0, 1.0]}
    inputs = {**given, "response_mask": [[1, 1]] * 2, "confidence": [[1.0] * 2, [0.0] * 2]}
    out = evaluate("clip", "echo", inputs)
    assert out["grad_logp"].tolist() == [[0, 0], [pytest.approx(-1.15 / 4)] * 2]


def test_echo_an_inverted_range_is_refused():
    with pytest.raises(rlx.ConfigError, match="clip echo.eps_min: must be <= eps_max"):
        rlx.create("clip", "echo", eps_min=0.3)


# ---- SAO -----------------------------------------------------------------------------------------------------------


def sao(d, advantages=None, **params):
    """Log ratios [T] of one row."""
    advantages = [1.0] if advantages is None else advantages
    inputs = {"logp_new": [[x - 1 for x in d]], "logp_rollout": [[-1.0] * len(d)], "response_mask": [[1] * len(d)]}
    return evaluate("clip", "sao", {**inputs, "advantages": advantages}, params)


def test_sao_the_band_is_the_same_for_both_signs_and_open_at_its_ends():
    d = [math.log(0.69), math.log(0.71), 0.0, math.log(5.9), math.log(6.1)]
    assert sao(d)["keep"].tolist() == sao(d, [-1.0])["keep"].tolist() == [[0, 1, 1, 1, 0]]
    assert (sao(d)["reject_low"], sao(d)["reject_high"]) == (0.2, 0.2)
    ends = evaluate(
        "clip",
        "sao",
        {
            "logp_new": [[math.log(0.5), math.log(2.0)]],
            "logp_rollout": [[0, 0]],
            "advantages": [1],
            "response_mask": [[1, 1]],
        },
        {"eps_low": 0.5, "eps_high": 1.0},
    )
    assert ends["keep"].tolist() == [[0, 0]]


def test_sao_the_gradient_is_minus_ratio_times_advantage_and_rejected_tokens_stay_in_the_count():
    out = sao([0.3, 3.0, -0.2], [2.0])
    assert out["grad_logp"][0].tolist() == pytest.approx([-2 * math.exp(0.3) / 3, 0, -2 * math.exp(-0.2) / 3])
    assert float(out["loss"]) == pytest.approx((-2 * math.exp(0.3) * -0.7 - 2 * math.exp(-0.2) * -1.2) / 3)


def test_sao_without_bounds_is_importance_weighted_reinforce():
    out = sao([-8.0, 0.0, 4.0], eps_low=1.0, eps_high=math.inf)
    assert out["keep"].tolist() == [[1, 1, 1]]
    assert out["grad_logp"][0].tolist() == pytest.approx([-math.exp(x) / 3 for x in (-8, 0, 4)])


def test_sao_a_number_that_is_not_finite_is_rejected_and_counted_apart():
    inputs = {
        "logp_new": [[-1.0, -1.0, -math.inf, -1.0]],
        "logp_rollout": [[-1.0, None, -1.0, -1.0]],
        "advantages": [[1.0, 1.0, 1.0, math.inf]],
        "response_mask": [[1, 1, 1, 1]],
    }
    out = evaluate("clip", "sao", inputs)
    assert out["keep"].tolist() == [[1, 0, 0, 0]] and out["unknown"] == 0.75
    assert (out["reject_low"], out["reject_high"]) == (0, 0)
    assert out["grad_logp"].tolist() == [[-0.25, 0, 0, 0]]


def test_sao_narrowing_the_band_only_drops_tokens():
    d = torch.linspace(-2, 2, 21).tolist()
    wide, low, high = sao(d)["keep"], sao(d, eps_low=0.1)["keep"], sao(d, eps_high=1.0)["keep"]
    assert (low <= wide).all() and (high <= wide).all() and low.sum() < wide.sum() > high.sum()


def test_sao_beside_a_correction_of_the_same_mismatch_is_refused():
    with pytest.raises(rlx.ConfigError, match="count twice"):
        rlx.build({"clip": "sao", "correction": "tis"}, HOST)
