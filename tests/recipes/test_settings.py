"""Settings that mean the same on every host, as the arguments of each."""

from __future__ import annotations

import pytest

import rlx_plugins as rlx
from rlx_plugins.recipes.run_folder import RunFolder
from rlx_plugins.recipes.schema import Profile, Recipe
from rlx_plugins.recipes.settings import SAME, flatten

FULL = {
    "model": "m",
    "task": "my.tasks:task",
    "teacher": "t",
    "value_model": "v",
    "prox_decay": 0.5,
    "steps": 10,
    "prompts_per_step": 6,
    "max_generated_tokens": 90_000,
    "max_update_tokens": 80_000,
    "group_size": 4,
    "updates_per_batch": 2,
    "max_prompt_length": 100,
    "max_response_length": 200,
    "generation_chunk": 50,
    "rollout_signals": ["info_gain"],
    "learning_rate": 1e-4,
    "temperature": 0.9,
    "kl_coef": 0.01,
}


def test_every_setting_of_a_profile_has_names_on_every_host():
    settings = set(FULL) - {"model", "task"}
    assert settings <= set(Profile.model_fields)
    assert all(set(names) == settings for names in SAME.values())


def test_settings_as_trls_arguments(monkeypatch):
    trl_run = pytest.importorskip("rlx_plugins.hosts.trl.run", exc_type=ImportError)
    monkeypatch.setattr(trl_run, "load_model_path", lambda name: f"/{name}")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert trl_run.setting_arguments(Profile(**FULL)) == {
        "max_steps": 20,  # TRL counts optimizer steps
        "num_iterations": 2,
        "num_generations": 4,
        "per_device_train_batch_size": 8,  # 24 rollouts on 3 processes, 8 at a time
        "gradient_accumulation_steps": 1,
        "max_completion_length": 200,
        "learning_rate": 1e-4,
        "temperature": 0.9,
        "beta": 0.01,
        "teacher_model": "/t",
        "value_model": "v",
        "prox_decay": 0.5,
        "generation_chunk": 50,
        "rollout_signals": ["info_gain"],
    }
    assert trl_run.setting_arguments(Profile()) == {}  # token budgets are `rlx run`'s own


@pytest.mark.parametrize(
    ("changes", "processes", "sizes"),
    [
        ({"prompts_per_step": 16}, 1, (8, 8)),
        ({"prompts_per_step": 16}, 4, (8, 2)),
        ({"prompts_per_step": 5}, 1, (4, 5)),
        ({"prompts_per_step": 16, "arguments": {"per_device_train_batch_size": 16}}, 1, (16, 4)),
        ({"prompts_per_step": 16, "task": "tiny"}, 1, (64, 1)),
        ({"prompts_per_step": 16, "task": "tiny", "arguments": {"num_generations": 2}}, 2, (16, 1)),
    ],
)
def test_a_steps_rollouts_are_one_optimizer_step_on_trl(monkeypatch, changes, processes, sizes):
    trl_run = pytest.importorskip("rlx_plugins.hosts.trl.run", exc_type=ImportError)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    found = trl_run.setting_arguments(Profile(**{"task": "my.tasks:task", "group_size": 4, **changes}))
    assert (found["per_device_train_batch_size"], found["gradient_accumulation_steps"]) == sizes


def test_rollouts_that_do_not_spread_over_the_processes_are_refused(monkeypatch):
    trl_run = pytest.importorskip("rlx_plugins.hosts.trl.run", exc_type=ImportError)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(rlx.ConfigError, match="16 rollouts of a step do not spread over 3 processes"):
        trl_run.setting_arguments(Profile(prompts_per_step=4, group_size=4))


def test_long_prompts_are_left_out_on_trl():
    trl_run = pytest.importorskip("rlx_plugins.hosts.trl.run", exc_type=ImportError)
    datasets = pytest.importorskip("datasets")
    from rlx_plugins.testing.tiny_model import build_tiny_tokenizer

    texts = ["1+1=", "1+1+1+1+1="]
    chats = [[{"role": "user", "content": text}] for text in texts]
    for prompts in (texts, chats):
        data = datasets.Dataset.from_dict({"prompt": prompts})
        assert len(trl_run.short_prompts(data, build_tiny_tokenizer(), 6)) == 1
        assert trl_run.short_prompts(data, build_tiny_tokenizer(), None) is data


def test_arguments_win_over_settings_on_trl(tmp_path):
    trl_run = pytest.importorskip("rlx_plugins.hosts.trl.run", exc_type=ImportError)
    profile = Profile(steps=5, updates_per_batch=2, learning_rate=0.1, arguments={"max_steps": 7})
    recipe = Recipe(name="a", title="A", host="trl", profiles={"tiny": profile})
    config = trl_run.make_config(recipe, profile, RunFolder(tmp_path), seed=0)
    assert (config.max_steps, config.num_iterations, config.learning_rate) == (7, 2, 0.1)


def test_settings_as_verls_options(monkeypatch):
    from rlx_plugins.hosts.verl import run as verl_run

    monkeypatch.setattr(verl_run, "load_model_path", lambda name: f"/{name}")
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    teacher = "distillation.teacher_models.teacher_model"
    assert verl_run.setting_overrides(Profile(**FULL)) == {
        "trainer.total_training_steps": 10,
        "rlx.max_generated_tokens": 90_000,
        "rlx.max_update_tokens": 80_000,
        "data.train_batch_size": 6,
        f"{actor}.ppo_mini_batch_size": 6,
        f"{actor}.ppo_epochs": 2,
        f"{rollout}.n": 4,
        "data.max_prompt_length": 100,
        "data.filter_overlong_prompts": True,
        "data.max_response_length": 200,
        f"{actor}.optim.lr": 1e-4,
        f"{rollout}.temperature": 0.9,
        f"{actor}.use_kl_loss": True,
        f"{actor}.kl_loss_coef": 0.01,
        "distillation.enabled": True,
        "distillation.distillation_loss.loss_mode": "k1",
        f"{teacher}.key": "teacher",
        f"{teacher}.model_path": "/t",
        "rlx.value_model": "v",
        "rlx.prox_decay": 0.5,
        "rlx.generation_chunk": 50,
        "rlx.rollout_signals": ["info_gain"],
    }
    assert verl_run.setting_overrides(Profile()) == {}
    assert verl_run.setting_overrides(Profile(kl_coef=0.0))[f"{actor}.use_kl_loss"] is False


@pytest.mark.parametrize("task", ["tiny-agent", "tiny-mixed"])
def test_tasks_with_rollout_code_for_trl_are_refused_on_verl(task):
    from rlx_plugins.hosts.verl import run as verl_run

    with pytest.raises(rlx.ConfigError, match=f"task {task} brings rollout code for host trl"):
        verl_run.task_files(Profile(task=task), seed=0)


def test_arguments_may_be_nested_or_dotted():
    nested = {"data": {"train_batch_size": 8}, "trainer.v1.trainer_mode": "rlx_sync", "+ray": {"a": {"b": 1}}}
    assert flatten(nested) == {
        "data.train_batch_size": 8,
        "trainer.v1.trainer_mode": "rlx_sync",
        "+ray": {"a": {"b": 1}},
    }
