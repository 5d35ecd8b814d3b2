"""What a verl configuration says about plug-ins, and what is refused before Ray starts."""

from __future__ import annotations

import subprocess
import sys

import pytest
from omegaconf import OmegaConf, open_dict

import rlx_plugins as rlx
from rlx_plugins.hosts.verl import settings
from rlx_plugins.hosts.verl.seams import stock_config


@pytest.fixture(scope="module")
def stock():
    return stock_config()


@pytest.fixture
def config(stock):
    """`config("key=value", ...)`: verl's configuration with our group and these overrides."""

    def make(*overrides, **rlx_options):
        made = OmegaConf.create(OmegaConf.to_container(stock, resolve=False))
        made.actor_rollout_ref.rollout.name = "rlx_hf"
        for name, value in rlx_options.items():
            made.rlx[name] = value
        for override in overrides:
            key, value = override.split("=", 1)
            with open_dict(made):
                OmegaConf.update(made, key, OmegaConf.create(f"v: {value}").v, force_add=True)
        return made

    return make


def test_plugins_are_words_or_keys_or_verls_own_flags(config):
    wanted = {"advantage": "dvao", "clip": {"name": "bapo", "target": 0.5}}
    words = config(plugins="advantage=dvao clip=bapo clip.target=0.5")
    keys = config("rlx.plugins.advantage=dvao", "rlx.plugins.clip.name=bapo", "rlx.plugins.clip.target=0.5")
    flags = config(
        "algorithm.adv_estimator=rlx.dvao",
        "actor_rollout_ref.actor.policy_loss.loss_mode=rlx.bapo",
        "rlx.plugins.clip.name=bapo",
        "rlx.plugins.clip.target=0.5",
    )
    for made in (words, keys, flags):
        assert settings.read_plugins(made) == wanted
        parts = settings.make_parts(made)
        assert parts.one("advantage").name == "dvao" and parts.one("clip").target == 0.5


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (["trainer.v1.trainer_mode=rlx_snyc"], {}, "did you mean 'rlx_sync'"),
        (["trainer.v1.trainer_mode=sync"], {}, "main_ppo"),
        (["trainer.use_v1=False"], {}, "use_v1"),
        ([], {"plugins": "clip=bapp"}, "did you mean 'bapo'"),
        ([], {"plugins": "clip=bapo clip.targte=1"}, "did you mean 'target'"),
        ([], {"plugin": "clip=bapo"}, "rlx.plugin: unknown; did you mean 'plugins'"),
        ([], {"generation_chunk": 0}, "rlx.generation_chunk"),
        ([], {"seed": "x"}, "rlx.seed"),
        ([], {"request_seeds": 1}, "rlx.request_seeds"),
        ([], {"rollout_signals": "info_gain"}, "rlx.rollout_signals: expected names"),
        ([], {"rollout_signals": ["logp_old"]}, "'logp_old', which the host makes itself"),
        ([], {"plugins": "advantage=a2tgpo"}, "'info_gain': a column of that name .* rlx.rollout_signals"),
        ([], {"plugins": "advantage=sao"}, "'values': set rlx.value_model .* critic.enable=True"),
        ([], {"plugins": "advantage=v05"}, "'value_prior': set rlx.value_model"),
        ([], {"plugins": "advantage=sao", "value_model": "no_such_module:f"}, "can't be imported"),
        (["critic.enable=True"], {"plugins": "advantage=sao", "value_model": "math:floor"}, "both supply values"),
        (["critic.enable=True"], {}, "no plug-in reads a critic's values"),
        (["critic.enable=True"], {"plugins": "advantage=v05"}, "which advantage v05 does not make"),
        (["critic.enable=True"], {"plugins": "allocator=v05 advantage=sao"}, "allocator v05 reads a prompt's value"),
        (["trainer.critic_warmup=2"], {}, "set it to 0"),
        ([], {"plugins": "method=ppo_ewma"}, "'logp_prox': set rlx.prox_decay"),
        ([], {"prox_decay": 1.0}, "rlx.prox_decay: must be in"),
        (["actor_rollout_ref.actor.strategy=fsdp"], {"prox_decay": 0.5}, "set actor.strategy=fsdp2"),
        ([], {"keep_versions": 0}, "rlx.keep_versions: expected a number"),
        ([], {"keep_versions": 2}, "trainer_mode=rlx_colocate_async; in rlx_sync pruner copris_is"),
        (
            ["actor_rollout_ref.model.use_fused_kernels=True", "actor_rollout_ref.actor.use_fused_kernels=True"],
            {"plugins": "clip=echo"},
            "'confidence': it is made of logits",
        ),
        ([], {"reward_components": "accuracy"}, "rlx.reward_components"),
        (["algorithm.adv_estimator=rlx.dvao"], {"plugins": "advantage=gdpo"}, "choose one"),
        (
            ["algorithm.adv_estimator=rloo"],
            {"plugins": "clip=bapo"},
            "adv_estimator=rloo would have no effect",
        ),
        (["actor_rollout_ref.actor.clip_ratio_high=0.3"], {"plugins": "clip=bapo"}, "use clip.eps_high"),
        (["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"], {}, "name an aggregate"),
        (["algorithm.use_kl_in_reward=True"], {}, "use_kl_loss"),
        (["algorithm.rollout_correction.rollout_is=token"], {}, "name a correction"),
        (["actor_rollout_ref.actor.shuffle=True"], {}, "actor.shuffle=True does not go with plug-ins"),
        (["actor_rollout_ref.actor.strategy=megatron"], {}, "accepted: fsdp, fsdp2"),
        (["distillation.enabled=True"], {}, "none of them reads a teacher"),
        (["actor_rollout_ref.rollout.calculate_log_probs=False"], {"plugins": "correction=tis"}, "calculate_log_probs"),
        ([], {"plugins": "ratio=token ratio.denominator=logp_rollout correction=tis"}, "mismatch would count twice"),
        ([], {"plugins": "pruner=april"}, "rlx.generation_chunk"),
        *(
            (
                [f"actor_rollout_ref.actor.{where}ulysses_sequence_parallel_size=2"],
                {"plugins": "pruner=arrol"},
                "'forward:hidden', which verl lacks as configured: set ulysses_sequence_parallel_size=1",
            )
            for where in ("", "fsdp_config.")
        ),
        (["trainer.v1.trainer_mode=rlx_colocate_async"], {"plugins": "reward=meds"}, "'forward:hidden', .*=rlx_sync"),
        (["trainer.v1.trainer_mode=rlx_colocate_async"], {"plugins": "allocator=pilot_commit"}, "rlx_sync"),
        (["actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"], {"plugins": "sampler=vade"}, "single_turn"),
        (
            ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=48"],
            {},
            "=48 does not divide a mini-batch: its .* rows",
        ),
        (
            ["actor_rollout_ref.actor.use_dynamic_bsz=True"],
            {"plugins": "aggregate=bnpo"},
            "use_dynamic_bsz=True; set it to False",
        ),
    ],
)
def test_mistakes_are_refused_with_one_clear_message(config, overrides, options, message):
    with pytest.raises(rlx.ConfigError, match=message.replace("(", r"\(")):
        settings.make_parts(config(*overrides, **options))


@pytest.mark.parametrize("where", ["", "fsdp_config."])
def test_processes_that_share_a_sequence_take_one_micro_batch_together(config, where):
    actor = "actor_rollout_ref.actor"
    n = config().actor_rollout_ref.actor.ppo_mini_batch_size * config().actor_rollout_ref.rollout.n
    two = ["trainer.n_gpus_per_node=2", f"{actor}.ppo_micro_batch_size_per_gpu={n}"]
    with pytest.raises(rlx.ConfigError, match="on 2 processes"):
        settings.make_parts(config(*two))
    settings.make_parts(config(*two, f"{actor}.{where}ulysses_sequence_parallel_size=2"))


def test_a_signal_that_needs_an_option_of_verl_is_there_with_it(config, registered):
    @registered("clip", "test_reference")
    class Reference(rlx.Clip):
        requires = frozenset({"logp_ref"})

        def __call__(self, terms):
            return terms.ratio

    with pytest.raises(rlx.ConfigError, match="use_kl_loss=True"):
        settings.make_parts(config(plugins="clip=test_reference"))
    settings.make_parts(config("actor_rollout_ref.actor.use_kl_loss=True", plugins="clip=test_reference"))


def test_verls_teacher_gives_the_teachers_log_probs(config, registered):
    @registered("distill", "test_reverse_kl")
    class ReverseKL(rlx.Distill):
        requires = frozenset({"logp_teacher"})

        def __call__(self, terms, loss):
            return terms.logp_new - terms.batch.logp_teacher

    plugins = {"plugins": "distill=test_reverse_kl"}
    with pytest.raises(rlx.ConfigError, match="loss_mode=k1"):
        settings.make_parts(config(**plugins))
    teacher = ["distillation.enabled=True", "distillation.distillation_loss.loss_mode=k1"]
    settings.make_parts(config(*teacher, **plugins))
    with pytest.raises(rlx.ConfigError, match="verl's own agent loops only"):
        settings.make_parts(config(*teacher, plugins="distill=test_reverse_kl sampler=vade"))


def test_signals_of_the_users_side_are_there_with_their_options(config):
    fields = {"rollout_signals": ["info_gain", "confidence"], "plugins": "method=a2tgpo"}
    assert settings.make_parts(config(**fields)).one("clip").name == "a2tgpo"
    frozen = config(plugins="advantage=sao", value_model="math:floor")
    critic = config("critic.enable=True", "trainer.critic_warmup=2", plugins="advantage=sao")
    for made, enabled in ((frozen, False), (critic, True)):
        settings.make_parts(made)
        settings.without_critic(made)
        assert made.critic.enable == enabled
    average = config("actor_rollout_ref.actor.strategy=fsdp2", plugins="method=ppo_ewma", prox_decay=0.5)
    assert "logp_prox" in settings.make_parts(average).requires


def test_a_missing_vllm_is_named(config, monkeypatch):
    from importlib import metadata

    known = metadata.version

    def without_vllm(name):
        if name.startswith("vllm"):
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(metadata, "version", without_vllm)
    with pytest.raises(rlx.ConfigError, match="vLLM is not installed: pip install 'rlx-plugins"):
        settings.make_parts(config("actor_rollout_ref.rollout.name=vllm"))


def test_another_verl_version_is_refused(config, monkeypatch):
    from importlib import metadata

    known = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.10.2" if name == "verl" else known(name))
    with pytest.raises(rlx.ConfigError, match="verl 0.10.2 is installed; the trainer modes work with verl >=0.9"):
        settings.make_parts(config())


def test_the_datasets_columns_are_signals(config, registered, tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    file = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"prompt": ["a"], "domain": [1], "extra_info": [{"index": 0, "prior": 0.5}]}), file)

    @registered("advantage", "test_by_prior")
    class ByPrior(rlx.Advantage):
        requires = frozenset({"prior", "domain"})

        def __call__(self, batch):
            return {"advantages": batch.spread(batch.prior)}

    with pytest.raises(rlx.ConfigError, match="'domain': add a column"):
        settings.make_parts(config(plugins="advantage=test_by_prior"))
    settings.make_parts(config(f"data.train_files={file}", plugins="advantage=test_by_prior"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (['rlx.plugins="clip=bapp"'], "unknown clip 'bapp'; did you mean 'bapo'"),
        (["+rlx.plugins.clip.name=bapo", "+rlx.plugins.clip.target=high"], "clip bapo.target: expected float"),
    ],
)
def test_the_command_refuses_before_ray_starts(tmp_path, words, message):
    command = [sys.executable, "-m", "rlx_plugins.hosts.verl", f"hydra.run.dir={tmp_path}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: {message}")
    assert "ray" not in done.stdout.lower()


@pytest.mark.parametrize("plugins", [{"sampler": "in_order"}, {"selector": "nat_rpc"}])
def test_what_works_on_text_only_is_refused_for_a_multimodal_model(plugins):
    from verl_tensors import PROFILE

    from rlx_plugins.hosts.verl.trainer import refuse_multimodal

    host = rlx.HostProfile("verl", PROFILE.signals, PROFILE.capabilities | {"choose_prompts"})
    with pytest.raises(rlx.ConfigError, match="works? on text only"):
        refuse_multimodal(rlx.build(plugins, host))
    refuse_multimodal(rlx.build({"clip": "bapo"}, host))
