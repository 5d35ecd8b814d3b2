"""The losses of verl and TRL, rebuilt from plug-ins, against the hosts' own functions: value and gradient, float64."""

from types import SimpleNamespace

import pytest
import torch

from rlx_plugins.core.registry import create
from rlx_plugins.testing.evaluation.building import run_loss
from rlx_plugins.testing.oracles import trl_compute_loss

# verl divides by a row's tokens + 1e-8; the plug-ins by the tokens. In float32 the two are the same number.
CLOSE = {"rtol": 3e-8, "atol": 1e-12}


def data(seed=0, rows=5, width=7, spread=0.6, empty_row=False, per_token=False):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=g, dtype=torch.float64) * 2 - 0.1
    new = old + spread * torch.randn(rows, width, generator=g, dtype=torch.float64)
    advantages = torch.randn(rows, width if per_token else 1, generator=g, dtype=torch.float64).expand(rows, width)
    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    mask = torch.arange(width) < lengths[:, None]
    mask[0] = True
    mask[0, 2] = False  # a tool's token in the middle
    if empty_row:
        mask[-1] = False
    weights = torch.rand(rows, width, generator=g, dtype=torch.float64) + 0.5
    return SimpleNamespace(old=old, new=new, advantages=advantages.contiguous(), mask=mask, weights=weights)


def ours(d, parts, agg, weights=None, total=None):
    columns = {} if weights is None else {"correction_weight": weights}
    return run_loss(
        parts,
        logp_new=d.new,
        logp_old=d.old,
        advantages=d.advantages,
        response_mask=d.mask.double(),
        agg=agg,
        correction=weights,
        total=total,
        **columns,
    )


def assert_same(mine, loss, grad, mask):
    torch.testing.assert_close(mine["loss"], loss.detach(), **CLOSE)
    torch.testing.assert_close(mine["grad_logp"], torch.where(mask, grad, 0.0), **CLOSE)
    assert mine["grad_logp"].abs().sum() > 0


# ---- verl ----------------------------------------------------------------------------------------------------------

UNBOUNDED = create("ratio", "token", log_clamp=None)
TOKEN_MEAN = create("aggregate", "token_mean")
SEQ_MEAN = create("aggregate", "seq_mean_token_mean")
COUNT_EMPTY = create("aggregate", "seq_mean_token_mean", empty_rows="count")

VERL = {
    "vanilla": ({"clip": create("clip", "ppo", eps_high=0.28, dual_clip=1.5)}, TOKEN_MEAN, "token-mean"),
    "gspo": (
        {"ratio": create("ratio", "sequence"), "clip": create("clip", "ppo", eps_high=0.28)},
        SEQ_MEAN,
        "seq-mean-token-mean",
    ),
    "sapo": ({"clip": create("clip", "sapo")}, SEQ_MEAN, "token-mean"),
    "cispo": ({"clip": create("clip", "cispo", eps_high=0.28)}, TOKEN_MEAN, "token-mean"),
    "geo_mean": ({"clip": create("clip", "gmpo", log_eps_low=0.2, log_eps_high=0.28)}, COUNT_EMPTY, "token-mean"),
    "clip_cov": (
        {
            "ratio": UNBOUNDED,
            "clip": create("clip", "clip_cov", eps_high=0.28, cov_low=0.1, cov_high=0.6, drop_share=1.0),
        },
        TOKEN_MEAN,
        "token-mean",
    ),
    "kl_cov": ({"clip": create("clip", "kl_cov", penalty_share=0.2, penalty_coef=0.7)}, TOKEN_MEAN, "token-mean"),
    "gpg": ({"clip": create("clip", "gpg")}, TOKEN_MEAN, "token-mean"),
    "dro": ({"clip": create("clip", "dro", penalty_coef=0.4)}, TOKEN_MEAN, "token-mean"),
}


def verl_loss(name, d, agg, weights=None):
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_high=0.28,
        clip_ratio_low=0.2,
        clip_ratio_c=1.5,
        policy_loss=PolicyLossConfig(
            loss_mode=name,
            clip_cov_ratio=1.0,
            clip_cov_lb=0.1,
            clip_cov_ub=0.6,
            kl_cov_ratio=0.2,
            ppo_kl_coef=0.7,
            dro_beta=0.4,
        ),
    )
    live = d.new.clone().requires_grad_()
    loss, _ = core.get_policy_loss_fn(name)(
        old_log_prob=d.old,
        log_prob=live,
        advantages=d.advantages,
        response_mask=d.mask,
        loss_agg_mode=agg,
        config=config,
        rollout_is_weights=weights,
    )
    return loss, torch.autograd.grad(loss, live)[0]


@pytest.mark.parametrize("per_token", [False, True], ids=["row-advantages", "token-advantages"])
@pytest.mark.parametrize("name", VERL)
def test_each_policy_loss_of_verl_is_reproduced(name, per_token):
    d = data(seed=1, empty_row=True, per_token=per_token)
    parts, rule, agg = VERL[name]
    assert_same(ours(d, parts, rule), *verl_loss(name, d, agg), d.mask)


@pytest.mark.parametrize("name", VERL)
def test_correction_weights_enter_as_the_rollout_weights_of_verl(name):
    d = data(seed=2)
    parts, rule, agg = VERL[name]
    assert_same(ours(d, parts, rule, d.weights), *verl_loss(name, d, agg, d.weights), d.mask)


def test_clip_cov_drops_tokens_in_the_comparison_with_verl():
    d = data(seed=1, empty_row=True)
    parts, rule, _ = VERL["clip_cov"]
    assert 0 < ours(d, parts, rule)["dropped"] < 1


@pytest.mark.parametrize("far", [25.0, -25.0])
@pytest.mark.parametrize("name", ["vanilla", "sapo", "cispo", "gspo"])
def test_the_bounds_on_the_log_ratio_are_those_of_verl(name, far):
    d = data(seed=3)
    d.old[0, 1] -= far
    d.old[1] -= far
    parts, rule, agg = VERL[name]
    assert_same(ours(d, parts, rule), *verl_loss(name, d, agg), d.mask)


@pytest.mark.parametrize(
    ("mode", "rule"),
    [
        ("token-mean", TOKEN_MEAN),
        ("token-sum", create("aggregate", "token_sum")),
        ("seq-mean-token-sum", create("aggregate", "seq_mean_token_sum")),
        ("seq-mean-token-sum-norm", create("aggregate", "seq_mean_token_sum_norm")),
        ("seq-mean-token-mean", SEQ_MEAN),
    ],
)
def test_each_reduction_of_verl_is_reproduced(mode, rule):
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    d = data(seed=4, empty_row=True)
    live = d.new.clone().requires_grad_()
    loss = core.agg_loss(-d.advantages * live, d.mask, mode)
    assert_same(ours(d, {"clip": create("clip", "gpg")}, rule), loss, torch.autograd.grad(loss, live)[0], d.mask)


def test_the_horizon_is_the_loss_scale_factor_of_verl():
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    d = data(seed=4, empty_row=True)
    live = d.new.clone().requires_grad_()
    loss = core.agg_loss(-d.advantages * live, d.mask, "seq-mean-token-sum-norm", loss_scale_factor=100)
    rule = create("aggregate", "seq_mean_token_sum_norm", horizon=100)
    assert_same(ours(d, {"clip": create("clip", "gpg")}, rule), loss, torch.autograd.grad(loss, live)[0], d.mask)


# ---- TRL -----------------------------------------------------------------------------------------------------------

ROW_RATIO = create("ratio", "sequence", gradient="sequence", log_max=None)
LUSPO = create("aggregate", "seq_mean_token_sum", empty_rows="count")
DR_GRPO = create("aggregate", "seq_mean_token_sum_norm", empty_rows="count", horizon=50)
PPO = create("clip", "ppo", eps_high=0.28)

TRL = {
    "grpo": (PPO, COUNT_EMPTY),
    "bnpo": (PPO, create("aggregate", "bnpo")),
    "dr_grpo": (PPO, DR_GRPO),
    "dapo": (PPO, TOKEN_MEAN),
    "luspo": (PPO, LUSPO),
    "cispo": (create("clip", "cispo", ratio_high=1.1), TOKEN_MEAN),
    "sapo": (create("clip", "sapo", tau_neg=1.25), COUNT_EMPTY),  # TRL holds it in float32: 1.05 would be rounded
    "vespo": (create("clip", "vespo"), TOKEN_MEAN),
}


def trl_loss(loss_type, d, level="token", delta=None, opsm=None, weights=None, num_items=None):
    pytest.importorskip("trl")
    live = d.new.clone().requires_grad_()
    loss = trl_compute_loss(
        loss_type,
        live,
        d.old,
        d.advantages,
        d.mask,
        level=level,
        epsilon_high=1.1 if loss_type == "cispo" else 0.28,
        off_policy_mask_threshold=opsm,
        importance_weights=weights,
        num_items=num_items,
        delta=delta,
        sapo_temperature_neg=1.25,
    )
    return loss, torch.autograd.grad(loss, live)[0]


@pytest.mark.parametrize("per_token", [False, True], ids=["row-advantages", "token-advantages"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", TRL)
def test_each_loss_type_of_trl_is_reproduced(loss_type, level, per_token):
    d = data(seed=5, empty_row=True, per_token=per_token)
    clip, rule = TRL[loss_type]
    parts = {"ratio": UNBOUNDED if level == "token" else ROW_RATIO, "clip": clip}
    assert_same(ours(d, parts, rule), *trl_loss(loss_type, d, level), d.mask)


@pytest.mark.parametrize("delta", [1.5, 1.1])
def test_the_two_sided_clip_is_that_of_trl(delta):
    d = data(seed=6)
    parts = {"ratio": UNBOUNDED, "clip": create("clip", "two_sided", eps_high=0.28, delta=delta)}
    assert_same(ours(d, parts, COUNT_EMPTY), *trl_loss("grpo", d, delta=delta), d.mask)


def test_another_number_of_items_divides_as_in_trl():
    d = data(seed=7)
    mine = ours(d, {"ratio": UNBOUNDED, "clip": PPO}, TOKEN_MEAN, total=40)
    assert_same(mine, *trl_loss("dapo", d, num_items=40), d.mask)


def test_off_policy_sequence_masking_is_that_of_trl_at_the_start_of_a_step():
    d = data(seed=8, rows=8)
    batch = SimpleNamespace(
        response_mask=d.mask, advantages=d.advantages, logp_old=d.new, logp_rollout=d.old, dtype=torch.float64
    )
    keep = create("correction", "opsm", threshold=0.02)(batch)["weight"]
    assert 0 < keep[d.mask].mean() < 1
    mine = ours(d, {"ratio": UNBOUNDED, "clip": PPO}, COUNT_EMPTY, keep)
    assert_same(mine, *trl_loss("grpo", d, opsm=0.02), d.mask)


def test_a_row_weight_of_vllm_joins_the_ratio_of_vespo():
    d = data(seed=9)
    row_weight = d.weights[:, :1]
    rollout = d.old - row_weight.log() / d.mask.sum(1, keepdim=True)
    mine = run_loss(
        {"clip": create("clip", "vespo", denominator="logp_rollout")},
        logp_new=d.new,
        logp_old=d.old,
        logp_rollout=rollout,
        advantages=d.advantages,
        response_mask=d.mask.double(),
        agg=TOKEN_MEAN,
    )
    assert_same(mine, *trl_loss("vespo", d, weights=row_weight), d.mask)
