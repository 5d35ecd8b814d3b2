"""Real verl runs whose signals come from the user's side: dataset, agent loop, reward function, value model, critic."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

HERE = Path(__file__).parent
MODULE = "rlx_plugins.hosts.verl"
OWN = {
    "VERL_USE_EXTERNAL_MODULES": f"{MODULE}.plugin,own_signals",
    "PYTHONPATH": f"{HERE.parents[2]}:{HERE}",
}
SMALL = {"prompts": 4, "rollouts": 4, "module": MODULE, "environment": OWN}
AGENT = "actor_rollout_ref.rollout.agent"
FOUND = "rlx/selector/test_signals/found_"


@pytest.fixture
def with_targets(verl_inputs, tmp_path):
    """The tiny task's training file with a column `target`, the number of the row, which is also its key."""
    rows = Dataset.from_parquet(str(verl_inputs["train_files"]), cache_dir=str(tmp_path))
    rows = rows.map(lambda row, i: {"prompt_key": str(i), "target": float(i)}, with_indices=True)
    rows.to_parquet(str(tmp_path / "train.parquet"))
    return tmp_path / "train.parquet"


def test_a_dataset_an_agent_loop_a_reward_function_and_a_value_model_supply_signals(verl_run, with_targets):
    run = verl_run(
        'rlx.plugins="reward=cadence advantage=sao clip=echo selector=test_signals"',
        "rlx.rollout_signals=[confidence,turn_ids,predicted,brevity]",
        'rlx.value_model="own_signals:values"',
        f"{AGENT}.agent_loop_config_path={HERE / 'agent.yaml'}",
        f"{AGENT}.default_agent_loop=test_two_turns",
        train_files=with_targets,
        steps=2,
        **SMALL,
    )
    for name in ("confidence", "values", "predicted", "turns", "outside", "target"):
        assert max(run.column(FOUND + name)) < 1e-5, name
    assert min(run.column(f"{FOUND}tool_tokens")) > 0 and min(run.column(f"{FOUND}brevity")) > 0
    assert run.column(f"{FOUND}components") == [2, 2]  # accuracy and format, but not brevity
    told = run.column(f"{FOUND}clip_epsilon")  # of the driver; the workers' own is the mean over the same rows
    assert run.column("rlx/clip/clip_epsilon") == pytest.approx(told, abs=1e-5)
    assert min(run.column("actor/grad_norm")) > 0


def test_verls_critic_learns_from_sao_and_the_workers_keep_an_averaged_policy(verl_run, verl_inputs):
    critic = [
        "critic.enable=true",
        "critic.strategy=fsdp2",
        f"critic.model.path={verl_inputs['model']}",
        f"critic.model.tokenizer_path={verl_inputs['model']}",
        "critic.model.use_remove_padding=false",
        "critic.model.enable_gradient_checkpointing=false",
        "critic.ppo_micro_batch_size_per_gpu=16",
        "critic.ppo_epochs=2",
        "critic.optim.lr=1e-3",
        "+critic.model.override_config.attn_implementation=sdpa",
        "+critic.fsdp.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
    ]
    run = verl_run(
        'rlx.plugins="advantage=sao correction=ppo_ewma correction.min_active=1 correction.eps_low=0'
        ' correction.eps_high=0 ratio=token ratio.denominator=logp_prox selector=test_proximal"',
        "rlx.prox_decay=0.5",
        *critic,
        steps=3,
        learning_rate=1e-3,
        **SMALL,
    )
    gap = run.column("rlx/selector/test_proximal/found_gap")
    assert gap[0] < 1e-5 < 1e-4 < gap[1] and gap[2] < 1e-5  # anew after the second step, where too few were active
    assert [share < 1 for share in run.column("rlx/correction/ppo_ewma/active_fraction")] == [False, True, False]
    loss = run.column("critic/vf_loss")
    assert 0 < loss[2] < loss[0]
    assert max(run.column("rlx/selector/test_proximal/found_beyond")) < 1e-5
    assert min(run.column("actor/grad_norm")) > 0
