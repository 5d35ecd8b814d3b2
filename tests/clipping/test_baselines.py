"""The clips of both hosts: invariants, edge cases, and what every one of them has in common."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.core.batch import RolloutBatch
from rlx_plugins.core.config import Parts
from rlx_plugins.core.objective import policy_loss
from rlx_plugins.core.registry import create
from rlx_plugins.core.terms import PolicyTerms
from rlx_plugins.testing import evaluate

NAN, INF = math.nan, math.inf
HOST = rlx.HostProfile("test", frozenset({"logp_old", "logp_rollout"}))

CLIPS = {
    "ppo": {"dual_clip": 3.0},
    "two_sided": {},
    "cispo": {},
    "sapo": {},
    "gmpo": {},
    "clip_cov": {"cov_low": 0.0, "drop_share": 0.3},
    "kl_cov": {"penalty_share": 0.3},
    "gpg": {},
    "dro": {"penalty_coef": 0.5},
    "vespo": {},
}
PROPORTIONAL = ["ppo", "two_sided", "cispo", "sapo", "gmpo", "clip_cov", "gpg", "vespo"]
"""Clips whose loss is proportional to the advantage."""


@pytest.fixture(params=CLIPS)
def clip(request):
    return create("clip", request.param, **CLIPS[request.param])


def random_batch(seed=0, rows=6, width=5, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    old = (-1.5 * torch.rand(rows, width, generator=g, dtype=torch.float64) - 0.1).to(dtype)
    new = old + (0.4 * torch.randn(rows, width, generator=g, dtype=torch.float64)).to(dtype)
    mask = torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=g)
    mask[0] = False
    advantages = torch.randn(rows, 1, generator=g, dtype=torch.float64).to(dtype).expand(rows, width).contiguous()
    return new, {"logp_old": old, "advantages": advantages, "response_mask": mask}


def loss_and_gradient(clip, new, columns, aggregate="seq_mean_token_mean", cuts=None, ratio="token"):
    """Loss and d loss / d logp_new of an optimizer step, over micro-batches cut at the given rows."""
    rule = create("aggregate", aggregate)
    given = {"group": torch.arange(len(new)), "row_id": torch.arange(len(new)), "rewards": torch.zeros(len(new))}
    batch = RolloutBatch(given | columns).with_columns(rewards=torch.zeros(len(new), dtype=new.dtype))
    weights = rule(batch, batch.response_mask)
    batch = batch.with_columns(loss_weight=weights["weight"], loss_count=weights["count"])
    parts = Parts({"advantage": [create("advantage", "grpo")], "ratio": [create("ratio", ratio)], "clip": [clip]})
    live = new.detach().clone().requires_grad_()
    losses = []
    for rows in torch.arange(len(new)).tensor_split(cuts or []):
        loss, _ = policy_loss(parts, batch.rows(rows), live[rows], totals={"policy": weights["count"].sum()})
        losses.append(loss)
    total = torch.stack(losses).sum()
    return total.detach(), torch.autograd.grad(total, live)[0]


# ---- what all of them have in common -------------------------------------------------------------------------------


def test_garbage_under_the_mask_touches_neither_loss_nor_gradient(clip):
    new, columns = random_batch()
    clean = loss_and_gradient(clip, new, columns)
    for garbage in (NAN, INF, -INF):
        dirty = {
            k: torch.where(columns["response_mask"], v, garbage) if v.is_floating_point() else v
            for k, v in columns.items()
        }
        got = loss_and_gradient(clip, torch.where(columns["response_mask"], new, garbage), dirty)
        torch.testing.assert_close(got, clean)
    assert clean[1].abs().sum() > 0


def test_a_batch_without_a_model_token_has_loss_and_gradient_zero(clip):
    new, columns = random_batch()
    columns["response_mask"] = torch.zeros_like(columns["response_mask"])
    loss, grad = loss_and_gradient(clip, new, columns)
    assert loss == 0
    assert not grad.any()


def test_micro_batches_add_up_to_the_batch_unless_the_rule_has_statistics_of_its_own(clip):
    new, columns = random_batch()
    whole = loss_and_gradient(clip, new, columns)
    split = loss_and_gradient(clip, new, columns, cuts=[2, 3])
    assert clip.scope == ("micro" if clip.name in ("clip_cov", "kl_cov") else "row")
    if clip.scope == "row":
        torch.testing.assert_close(split, whole)


def test_the_order_of_the_rows_and_wider_padding_do_not_matter(clip):
    new, columns = random_batch()
    loss, grad = loss_and_gradient(clip, new, columns)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    row_id = {"row_id": torch.arange(6)[order]}
    shuffled = loss_and_gradient(clip, new[order], {k: v[order] for k, v in columns.items()} | row_id)
    torch.testing.assert_close(shuffled, (loss, grad[order]))
    wider = {k: torch.nn.functional.pad(v, (0, 3)) for k, v in columns.items()}
    padded_loss, padded_grad = loss_and_gradient(clip, torch.nn.functional.pad(new, (0, 3)), wider)
    torch.testing.assert_close((padded_loss, padded_grad[:, :5]), (loss, grad))


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_lower_precision_gives_nearly_the_same_loss_and_gradient(clip, dtype, close):
    new, columns = random_batch(dtype=dtype)
    loss, grad = loss_and_gradient(clip, new, columns)
    exact = {k: v.double() if v.is_floating_point() else v for k, v in columns.items()}
    exact_loss, exact_grad = loss_and_gradient(clip, new.double(), exact)
    assert loss.dtype == grad.dtype == dtype
    if dtype == torch.float32 or clip.scope == "row":  # a bfloat16 covariance may rank other tokens first
        torch.testing.assert_close(loss.double(), exact_loss, rtol=close, atol=close)
        torch.testing.assert_close(grad.double(), exact_grad, rtol=close, atol=close)


def test_no_clip_waits_for_the_device(clip):
    """On the meta device every read of a value on the host raises."""
    new, columns = random_batch()
    meta = {k: v.to("meta") for k, v in columns.items()}
    batch = RolloutBatch(meta | {"row_id": torch.arange(6, device="meta"), "group": torch.arange(6, device="meta")})
    terms = PolicyTerms(new.to("meta").requires_grad_(), batch, advantages=batch.advantages)
    terms.ratio = create("ratio", "token")(terms)
    out = clip(terms)
    loss = out[0] if isinstance(out, tuple) else out
    loss.sum().backward()
    assert loss.device.type == "meta"
    assert loss.shape == new.shape


@pytest.mark.parametrize("name", PROPORTIONAL)
def test_where_the_advantage_is_zero_nothing_is_learned(name):
    new, columns = random_batch()
    columns["advantages"] = torch.zeros_like(columns["advantages"])
    loss, grad = loss_and_gradient(create("clip", name, **CLIPS[name]), new, columns)
    assert loss == 0
    assert not grad.any()


@pytest.mark.parametrize("name", ["ppo", "two_sided", "cispo", "sapo", "gmpo", "gpg", "vespo"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_on_policy_the_gradient_is_minus_the_advantage_times_the_weight(name, ratio):
    new, columns = random_batch()
    columns["logp_old"] = new
    _, grad = loss_and_gradient(create("clip", name, **CLIPS[name]), new, columns, ratio=ratio)
    mask = columns["response_mask"]
    weight = mask.double() / mask.sum(1, keepdim=True).clamp(min=1) / mask.any(1).sum()
    torch.testing.assert_close(grad, -columns["advantages"] * weight)


@pytest.mark.parametrize("name", ["ppo", "two_sided", "cispo", "sapo"])
@pytest.mark.parametrize("far", [INF, -INF])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_infinite_log_ratio_leaves_loss_and_gradient_finite(name, far, advantage):
    new = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    columns = {
        "logp_old": torch.tensor([[-1.0 - far, -1.0]], dtype=torch.float64),
        "advantages": torch.full((1, 2), advantage, dtype=torch.float64),
        "response_mask": torch.ones(1, 2).bool(),
    }
    loss, grad = loss_and_gradient(create("clip", name, **CLIPS[name]), new, columns)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()
    assert grad[0, 1] != 0


# ---- what each of them does to a token ------------------------------------------------------------------------------


def token_loss(clip, log_ratio, advantage, logp=-1.0, ratio=None, **columns):
    """Loss and gradient of tokens [T] of one row, with the given log ratios and advantages."""
    d, adv = torch.tensor([log_ratio], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    live = (torch.zeros_like(d) + torch.tensor(logp, dtype=torch.float64)).requires_grad_()
    given = {"response_mask": torch.ones_like(d).bool(), "group": torch.zeros(1), "row_id": torch.zeros(1).long()}
    batch = RolloutBatch({**given, "logp_old": live.detach() - d, **columns})
    terms = PolicyTerms(live, batch, advantages=adv)
    terms.ratio = (ratio or create("ratio", "token", log_clamp=None))(terms)
    out = clip(terms)
    loss = out[0] if isinstance(out, tuple) else out
    return loss[0].detach(), torch.autograd.grad(loss.sum(), live)[0][0]


def test_ppo_with_dual_clip_bounds_the_loss_of_a_bad_token_and_two_sided_does_it_on_the_ratio():
    for clip in (create("clip", "ppo", dual_clip=3.0), create("clip", "two_sided", delta=3.0)):
        loss, grad = token_loss(clip, [3.0, 1.0], [-1.0, -1.0])
        assert loss.tolist() == pytest.approx([3.0, math.e])
        assert grad.tolist() == pytest.approx([0.0, math.e])
    loss, _ = token_loss(create("clip", "ppo"), [3.0], [-1.0])
    assert loss.tolist() == pytest.approx([math.exp(3)])


def test_a_cap_inside_the_range_binds_good_tokens_too():
    loss, grad = token_loss(create("clip", "two_sided", delta=1.1), [math.log(1.15)], [1.0])
    assert loss.tolist() == pytest.approx([-1.1])
    assert grad.tolist() == [0.0]


def test_cispo_bounds_the_weight_and_keeps_the_gradient():
    loss, grad = token_loss(create("clip", "cispo", eps_high=0.5), [3.0, -3.0, 0.1], [1.0, 1.0, -2.0], logp=-2.0)
    assert grad.tolist() == pytest.approx([-1.5, -0.8, 2 * math.exp(0.1)])
    assert loss.tolist() == pytest.approx([3.0, 1.6, -4 * math.exp(0.1)])


def test_cispo_of_verl_without_a_lower_bound_is_cispo_of_trl_with_one_plus_its_upper_bound():
    log_ratio, advantage = [3.0, -3.0, 0.1], [1.0, 1.0, -2.0]
    verl = token_loss(create("clip", "cispo", eps_low=1.0, eps_high=4.0), log_ratio, advantage)
    trl = token_loss(create("clip", "cispo", ratio_high=5.0), log_ratio, advantage)
    torch.testing.assert_close(verl, trl)


def test_sapo_fades_with_the_distance_from_one_and_faster_for_bad_tokens():
    loss, grad = token_loss(create("clip", "sapo", tau_neg=2.0), [0.0, math.log(2), math.log(2)], [1.0, 1.0, -1.0])

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    assert loss.tolist() == pytest.approx([-2.0, -4 * sigmoid(1), 2 * sigmoid(2)])
    slopes = [1.0, 4 * sigmoid(1) * sigmoid(-1) * 2, 4 * sigmoid(2) * sigmoid(-2) * 2]
    assert grad.tolist() == pytest.approx([-slopes[0], -slopes[1], slopes[2]])


def test_gmpo_clips_each_token_in_log_space_before_the_mean():
    loss, grad = token_loss(create("clip", "gmpo"), [1.0, -1.0], [1.0, 1.0])  # 1.0 is clipped to 0.4, -1.0 is not
    assert loss.tolist() == pytest.approx([-math.exp(-0.3)] * 2)
    assert grad.tolist() == pytest.approx([0.0, -math.exp(-0.3)])  # summed over two tokens that carry the row's loss


def test_gmpo_ignores_the_ratio_of_tokens_without_advantage_even_if_infinite():
    loss, grad = token_loss(create("clip", "gmpo"), [INF, 0.2], [0.0, 1.0])
    assert loss.tolist() == pytest.approx([-0.5 * math.exp(0.1)] * 2)
    assert grad.tolist() == pytest.approx([0.0, -0.5 * math.exp(0.1)])


def test_clip_cov_drops_the_drawn_share_of_the_candidates():
    """mean A = 0.5, mean logp = -1.5: covariances 0.75, -0.25, -0.25, 0.75; one of the two candidates is dropped."""
    clip = create("clip", "clip_cov", cov_low=0.1, drop_share=0.25)
    draw = {"uniform:clip_cov/drop": torch.tensor([[0.9, 0.0, 0.1, 0.3]])}
    loss, grad = token_loss(clip, [0.0] * 4, [2.0, 1.0, 0.0, -1.0], logp=[-1.0, -2.0, -1.0, -2.0], **draw)
    assert loss.tolist() == [-2.0, -1.0, 0.0, 0.0]
    assert grad.tolist() == [-2.0, -1.0, 0.0, 0.0]


def test_clip_cov_leaves_tokens_alone_whose_gradient_the_clip_removed():
    clip = create("clip", "clip_cov", cov_low=0.1, drop_share=1.0)
    loss, _ = token_loss(clip, [1.0, 0.0], [1.0, -1.0], logp=[-1.0, -2.0])
    assert loss.tolist() == pytest.approx([-1.2, 0.0])


def test_clip_cov_draws_every_token_of_a_row_equally_often():
    clip = create("clip", "clip_cov", cov_low=-10.0, cov_high=10.0, drop_share=0.25)
    times = torch.zeros(4)
    for row_id in range(400):
        loss, _ = token_loss(clip, [0.0] * 4, [1.0] * 4, row_id=torch.tensor([row_id]))
        times += loss == 0
    assert times.sum() == 400, "one of four each time"
    assert ((times > 70) & (times < 130)).all(), times


def test_kl_cov_penalises_the_tokens_of_largest_covariance():
    """Covariances 0.75, -0.25, -0.25, 0.75; the one token of the share is the first of the largest."""
    clip = create("clip", "kl_cov", penalty_share=0.3, penalty_coef=0.5)
    loss, grad = token_loss(clip, [-0.2, 0.1, 0.0, 0.0], [2.0, 1.0, 0.0, -1.0], logp=[-1.0, -2.0, -1.0, -2.0])
    r = [math.exp(-0.2), math.exp(0.1)]
    assert loss.tolist() == pytest.approx([-2 * r[0] + 0.1, -r[1], 0.0, 1.0])
    assert grad.tolist() == pytest.approx([-2 * r[0] - 0.5, -r[1], 0.0, 1.0])


def test_dro_pulls_back_to_the_old_policy_where_the_advantage_is_zero_too():
    loss, grad = token_loss(create("clip", "dro", penalty_coef=0.5), [0.4, 0.4], [1.0, 0.0])
    assert loss.tolist() == pytest.approx([1.04, 0.04])
    assert grad.tolist() == pytest.approx([-1 + 0.2, 0.2])


def test_vespo_weighs_a_row_by_its_whole_likelihood_ratio():
    loss, grad = token_loss(create("clip", "vespo"), [0.1, 0.2], [1.0, -1.0])
    phi = [math.exp(3 + 2 * 0.3 - 3 * math.exp(0.3)), math.exp(2 + 3 * 0.3 - 2 * math.exp(0.3))]
    assert loss.tolist() == pytest.approx([phi[0], -phi[1]])
    assert grad.tolist() == pytest.approx([-phi[0], phi[1]])


def test_vespo_bounds_the_log_ratio_of_a_token_before_the_sum_and_that_of_the_row_below():
    loss, _ = token_loss(create("clip", "vespo"), [25.0, -23.0], [1.0, 1.0])
    assert loss.tolist() == pytest.approx([1.0, 1.0]), "20 - 20, not 25 - 23"
    loss, _ = token_loss(create("clip", "vespo", k_pos=0.1), [-15.0, -15.0], [1.0, 1.0])
    assert loss.tolist() == pytest.approx([math.exp(3 + 0.1 * math.log(1e-8) - 3e-8)] * 2)


def test_tokens_unknown_to_the_engine_are_no_evidence_that_the_policy_has_left():
    """mean(logp_rollout - logp_old) is 0.6 over the two known tokens, and 0.4 over the row's three."""
    columns = {
        "response_mask": torch.ones(1, 3).bool(),
        "group": torch.zeros(1),
        "rewards": torch.zeros(1),
        "advantages": -torch.ones(1, 3),
        "logp_old": -torch.ones(1, 3),
        "logp_rollout": torch.tensor([[-0.4, NAN, -0.4]]),
    }
    batch = RolloutBatch(columns)
    assert create("correction", "opsm", threshold=0.5)(batch)["weight"].tolist() == [[1.0] * 3]
    assert create("correction", "opsm", threshold=0.3)(batch)["weight"].tolist() == [[0.0] * 3]


# ---- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gmpo", "kl_cov", "gpg", "dro", "vespo"])
def test_a_clip_that_makes_its_own_ratio_refuses_another(name):
    spec = {"name": name, **CLIPS[name]}
    assert rlx.build({"clip": spec}, HOST).one("clip").name == name
    with pytest.raises(rlx.ConfigError, match=f"clip {name} does the work of a ratio itself; remove ratio=sequence"):
        rlx.build({"clip": spec, "ratio": "sequence"}, HOST)


@pytest.mark.parametrize("name", ["gmpo", "sapo"])
def test_a_clip_that_averages_within_rows_brings_its_aggregate(name):
    assert rlx.build({"clip": name}, HOST).one("aggregate").name == "seq_mean_token_mean"
    counted = rlx.build({"clip": name, "aggregate": {"name": "seq_mean_token_mean", "empty_rows": "count"}}, HOST)
    assert counted.one("aggregate").empty_rows == "count"
    with pytest.raises(rlx.ConfigError, match="works with aggregate=seq_mean_token_mean only"):
        rlx.build({"clip": name, "aggregate": "token_mean"}, HOST)


def test_dro_has_to_be_told_its_penalty():
    with pytest.raises(rlx.ConfigError, match="penalty_coef.*must be given"):
        create("clip", "dro")


def test_the_bounds_of_clip_covs_covariance_are_in_order():
    with pytest.raises(rlx.ConfigError, match="cov_high: must be > cov_low"):
        create("clip", "clip_cov", cov_low=2.0, cov_high=1.0)


# ---- the function form -----------------------------------------------------------------------------------------------

ROWS = {
    "logp_new": [[-0.5, -1.0], [-0.7, -0.9]],
    "logp_old": [[-0.9, -0.8], [-0.6, -1.1]],
    "advantages": [1.0, -1.0],
    "response_mask": [[1, 1], [1, 1]],
}


def test_with_rows_of_equal_length_and_no_dual_clip_verl_and_trl_agree():
    verl = evaluate("clip", "baselines", ROWS, {"c": INF})
    for loss in ("grpo", "bnpo", "dapo"):
        trl = evaluate("clip", "baselines", ROWS, {"host": "trl", "loss": loss})
        torch.testing.assert_close((trl["loss"], trl["grad_logp"]), (verl["loss"], verl["grad_logp"]))


def test_gspo_of_verl_and_the_sequence_level_of_trl_agree_in_value_and_in_each_rows_gradient():
    parameters = {"loss": "gspo", "agg": "seq-mean-token-mean"}
    verl = evaluate("clip", "baselines", ROWS, parameters)
    trl = evaluate("clip", "baselines", ROWS, {"host": "trl", "loss": "grpo", "level": "sequence"})
    torch.testing.assert_close(verl["loss"], trl["loss"])
    torch.testing.assert_close(verl["grad_logp"].sum(1), trl["grad_logp"].sum(1))


def test_where_verl_divides_by_no_token_the_function_form_says_so_and_trl_gives_zero():
    empty = {**ROWS, "response_mask": [[0, 0], [0, 0]]}
    assert evaluate("clip", "baselines", empty)["loss"].isnan()
    assert evaluate("clip", "baselines", empty, {"agg": "token-sum"})["loss"] == 0
    for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"):
        assert evaluate("clip", "baselines", empty, {"host": "trl", "loss": loss})["loss"] == 0


def test_the_off_policy_mask_drops_a_bad_row_the_policy_has_left():
    """mean(logp_old - logp_new) is -0.1 in the first row and -0.05 in the second, whose advantage is negative."""
    kept = evaluate("clip", "baselines", ROWS, {"host": "trl", "loss": "grpo", "opsm": -0.04})
    dropped = evaluate("clip", "baselines", ROWS, {"host": "trl", "loss": "grpo", "opsm": -0.06})
    assert kept["per_token_loss"][1].all()
    assert dropped["per_token_loss"][0].all()
    assert not dropped["per_token_loss"][1].any()
    torch.testing.assert_close(dropped["loss"], kept["per_token_loss"][0].mean() / 2)


@pytest.mark.parametrize("variant", ["tv", "kl"])
def test_the_divergence_masks_of_verl_are_dppo_with_the_range_as_thresholds_and_its_dual_clip_as_cap(variant):
    ours = evaluate("clip", "baselines", ROWS, {"loss": f"dppo_{variant}", "low": 0.05, "high": 0.01, "c": 1.1})
    limits = {"delta_low": 0.05, "delta_high": 0.01, "ratio_cap": 1.1}
    card = evaluate("clip", "dppo", ROWS, {"variant": variant, **limits})
    for name in ("loss", "per_token_loss", "grad_logp"):
        torch.testing.assert_close(ours[name], card[name])
    by_default = evaluate("clip", "dppo", ROWS, {"variant": variant, "ratio_cap": 3.0})["loss"]
    torch.testing.assert_close(evaluate("clip", "baselines", ROWS, {"loss": f"dppo_{variant}"})["loss"], by_default)


def test_a_loss_the_host_does_not_have_is_refused_with_those_it_has():
    with pytest.raises(rlx.ConfigError, match="host trl has grpo, .*got 'gspo'"):
        evaluate("clip", "baselines", ROWS, {"host": "trl", "loss": "gspo"})


def test_the_upper_bound_of_trl_follows_its_lower_one_unless_given():
    """The ratio of the first token is exp(0.4) = 1.49."""
    follows = evaluate("clip", "baselines", ROWS, {"host": "trl", "loss": "grpo", "low": 0.3})
    given = evaluate("clip", "baselines", ROWS, {"host": "trl", "loss": "grpo", "low": 0.3, "high": 0.1})
    assert float(follows["per_token_loss"][0, 0]) == pytest.approx(-1.3)
    assert float(given["per_token_loss"][0, 0]) == pytest.approx(-1.1)


def test_dapo_divides_by_the_number_of_items_and_dr_grpo_by_the_longest_completion():
    plain = evaluate("clip", "baselines", ROWS, {"host": "trl", "loss": "dapo"})
    assert plain["per_token_loss"].sum() / 4 == pytest.approx(float(plain["loss"]))
    items = evaluate("clip", "baselines", ROWS, {"host": "trl", "loss": "dapo", "num_items": 8})
    longest = evaluate("clip", "baselines", ROWS, {"host": "trl", "loss": "dr_grpo", "max_len": 16})
    torch.testing.assert_close(items["loss"], plain["loss"] / 2)
    torch.testing.assert_close(longest["loss"], plain["loss"] * 4 / (2 * 16))


def test_the_names_of_the_library_work_in_the_function_form_too():
    theirs = evaluate("clip", "baselines", ROWS, {"low": 0.1, "high": 0.3, "c": 1.5})
    ours = evaluate("clip", "baselines", ROWS, {"eps_low": 0.1, "eps_high": 0.3, "dual_clip": 1.5})
    torch.testing.assert_close(ours, theirs)


def test_each_row_of_gmpo_is_reported_as_one_number_and_the_loss_is_their_plain_mean():
    rows = {**ROWS, "response_mask": [[1, 1], [0, 0]]}
    got = evaluate("clip", "baselines", rows, {"loss": "geo_mean"})
    assert got["per_seq_loss"].tolist() == pytest.approx([-math.exp((0.2 - 0.2) / 2), 0.0])
    assert float(got["loss"]) == pytest.approx(-0.5)
