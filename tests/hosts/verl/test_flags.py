"""Single methods by verl's own flags, called the way verl calls them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos
from verl.utils.config import omega_conf_to_dataclass
from verl_tensors import batch

import rlx_plugins as rlx
from rlx_plugins.hosts.verl import flags, plugin
from rlx_plugins.hosts.verl.seams import stock_config


def estimate(name, table, padding=0, **parameters):
    """Advantages the way `compute_advantage` asks for them."""
    n, width = table.response_mask.shape
    rewards = torch.zeros(n + padding, width, dtype=table.rewards.dtype)
    rewards[:n, 0] = table.rewards
    mask = torch.cat([table.response_mask.long(), torch.zeros(padding, width, dtype=torch.int64)])
    uids = [f"u{g}" for g in table.group.tolist()] + ["pad00"] * padding
    config = OmegaConf.create({"rlx": parameters} if parameters else {})
    fn = core_algos.get_adv_estimator_fn(name)
    return fn(token_level_rewards=rewards, response_mask=mask, config=config, index=np.array(uids, dtype=object))[0]


@pytest.fixture(scope="module")
def actor_config():
    """verl's ActorConfig in a training worker, converted from the Hydra configuration by verl."""

    def make(name, parameters=None, **changes):
        node = stock_config().actor_rollout_ref.actor
        OmegaConf.set_struct(node, False)
        node.policy_loss.loss_mode = name
        node.ppo_micro_batch_size_per_gpu = 4
        node.rollout_n = 2
        if parameters is not None:
            node.policy_loss._target_ = "rlx_plugins.hosts.verl.flags.RLXPolicyLossConfig"
            node.policy_loss.params = parameters
        for key, value in changes.items():
            node[key] = value
        made = omega_conf_to_dataclass(node)
        made.global_batch_info.update(dp_size=1, batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None)
        return made

    return make


def policy_loss(name, config, table, logp):
    loss_fn = core_algos.get_policy_loss_fn(name)
    filled = torch.where(table.response_mask, table.logp_old, 0)
    return loss_fn(
        old_log_prob=filled,
        log_prob=logp,
        advantages=table.advantages,
        response_mask=table.response_mask,
        loss_agg_mode="token-mean",
        config=config,
    )


def test_grpo_is_verls_grpo():
    table = batch()
    uids = np.array([f"u{g}" for g in table.group.tolist()], dtype=object)
    rewards = torch.zeros_like(table.logp_old)
    rewards[:, 0] = table.rewards
    wanted, _ = core_algos.compute_grpo_outcome_advantage(rewards, table.response_mask, uids)
    torch.testing.assert_close(estimate("rlx.grpo", table), wanted, atol=1e-9, rtol=0)


def test_rloo_is_verls_rloo():
    table = batch()
    uids = np.array([f"u{g}" for g in table.group.tolist()], dtype=object)
    rewards = torch.zeros_like(table.logp_old)
    rewards[:, 0] = table.rewards
    wanted, _ = core_algos.compute_rloo_outcome_advantage(rewards, table.response_mask.to(rewards.dtype), uids)
    torch.testing.assert_close(estimate("rlx.rloo", table), wanted, atol=1e-9, rtol=0)


def test_an_estimator_gives_what_the_batch_phase_gives():
    table = batch()
    for name in ("gapo_snr", "dr_grpo", "grpo"):
        wanted = rlx.create("advantage", name)(table)["advantages"]
        torch.testing.assert_close(estimate(f"rlx.{name}", table), wanted, atol=1e-9, rtol=0)


def test_parameters_reach_an_estimator_through_the_algorithm_group():
    table = batch()
    wanted = rlx.create("advantage", "grpo", scale="none")(table)["advantages"]
    torch.testing.assert_close(estimate("rlx.grpo", table, scale="none"), wanted, atol=1e-9, rtol=0)
    with pytest.raises(rlx.ConfigError, match="unknown parameter 'scael'"):
        estimate("rlx.grpo", table, scael="none")


def test_padding_rows_are_in_no_statistic(registered):
    @registered("advantage", "test_batch_mean")
    class BatchMean(rlx.Advantage):
        def __call__(self, batch):
            return {"advantages": batch.spread(batch.rewards - batch.rewards.nanmean())}

    core_algos.register_adv_est("rlx.test_batch_mean")(plugin.AdvantageFlag("test_batch_mean"))
    table = batch()
    out = estimate("rlx.test_batch_mean", table, padding=3)
    wanted = table.spread(table.rewards - table.rewards.mean())
    torch.testing.assert_close(out[:8], wanted, atol=1e-12, rtol=0)
    assert (out[8:] == 0).all()


@pytest.mark.parametrize("name", ["dvao", "gdpo", "lead", "avspo"])
def test_what_an_estimators_flag_can_not_carry_is_refused_with_the_remedy(name):
    with pytest.raises(rlx.ConfigError, match="trainer.v1.trainer_mode=rlx_sync"):
        estimate(f"rlx.{name}", batch())


@pytest.mark.parametrize("name", ["sat", "rollout_replay", "gapo_clip", "clip_cov"])
def test_what_a_policy_losses_flag_can_not_carry_is_refused_with_the_remedy(name, actor_config):
    table = rlx.prepare(rlx.build({}, PROFILE), batch()).batch
    with pytest.raises(rlx.ConfigError, match="trainer.v1.trainer_mode=rlx_sync"):
        policy_loss(f"rlx.{name}", actor_config(f"rlx.{name}"), table, table.logp_old)


def test_ppo_is_verls_vanilla_loss(actor_config):
    table = rlx.prepare(rlx.build({}, PROFILE), batch()).batch
    noise = torch.randn(table.logp_old.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    logp = (torch.where(table.response_mask, table.logp_old, 0) + 0.3 * noise).requires_grad_()
    loss, _ = policy_loss("rlx.ppo", actor_config("rlx.ppo", {"dual_clip": 3.0}), table, logp)
    (gradient,) = torch.autograd.grad(loss, logp)
    wanted, _ = policy_loss("vanilla", actor_config("vanilla"), table, logp)
    (wanted_gradient,) = torch.autograd.grad(wanted, logp)
    assert float(loss) == pytest.approx(float(wanted), abs=1e-9)
    torch.testing.assert_close(gradient, wanted_gradient, atol=1e-9, rtol=0)


def test_parameters_of_a_clip_survive_verls_conversion(actor_config):
    table = rlx.prepare(rlx.build({}, PROFILE), batch()).batch
    logp = torch.where(table.response_mask, table.logp_old, 0) + 0.5
    wide, _ = policy_loss("rlx.ppo", actor_config("rlx.ppo", {"eps_low": 0.9, "eps_high": 0.9}), table, logp)
    narrow, _ = policy_loss("rlx.ppo", actor_config("rlx.ppo", {"eps_low": 0.1, "eps_high": 0.1}), table, logp)
    assert abs(float(wide - narrow)) > 1e-3


def test_every_name_is_registered_and_imports_no_method():
    from rlx_plugins.core.registry import builtin_names

    assert {f"rlx.{n}" for n in builtin_names("advantage")} <= set(core_algos.ADV_ESTIMATOR_REGISTRY)
    assert {f"rlx.{n}" for n in builtin_names("clip")} <= set(core_algos.POLICY_LOSS_REGISTRY)


def test_a_failure_while_loading_is_told_by_the_first_call_and_by_the_doctor(monkeypatch):
    from rlx_plugins.hosts.verl.seams import check_seams

    monkeypatch.setattr(plugin, "failures", ["ImportError: no module named x"])
    with pytest.raises(rlx.ConfigError, match="no module named x.*rlx doctor"):
        core_algos.get_adv_estimator_fn("rlx.grpo")(token_level_rewards=None, response_mask=None)
    assert any("no module named x" in problem for problem in check_seams())


PROFILE = rlx.HostProfile("test", frozenset({"reward_components", "logp_old"}))
assert flags.RLXPolicyLossConfig().params == {}
