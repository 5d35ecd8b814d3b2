"""Plug-ins in the configuration: every way to write them, and what is refused before a model is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import HfArgumentParser
from trl import TrlParser
from trl_tiny import config, dataset, digits

import rlx_plugins as rlx
from rlx_plugins.hosts.trl import RLXConfig, RLXTrainer, profile

CPU = ["--output_dir", "out", "--use_cpu", "true", "--bf16", "false"]


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
@pytest.mark.parametrize(
    "text",
    [
        "advantage=grpo clip=ppo clip.eps_high=0.28",
        '{"advantage": "grpo", "clip": {"name": "ppo", "eps_high": 0.28}}',
    ],
)
def test_plugins_are_read_from_a_command_line(parser, text):
    (args,) = parser((RLXConfig,)).parse_args_into_dataclasses([*CPU, "--plugins", text])
    assert args.plugins == {"advantage": "grpo", "clip": {"name": "ppo", "eps_high": 0.28}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"advantage": "grpo"', "plugins: not JSON: Expecting .*, in {.advantage.: .grpo."),
        ("advantage grpo", "plugins: expected key=value, got 'advantage'"),
        ('clip="ppo', 'plugins: No closing quotation, in clip="ppo'),
    ],
)
def test_plugins_that_can_not_be_read_from_a_command_line_are_refused_by_name(text, message):
    with pytest.raises(rlx.ConfigError, match=message):
        HfArgumentParser((RLXConfig,)).parse_args_into_dataclasses([*CPU, "--plugins", text])


def test_plugins_are_read_from_a_yaml_file_and_the_command_line_wins(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("plugins:\n  advantage: grpo\n  clip: {name: ppo, eps_high: 0.28}\nbeta: 0.5\n")
    (args,) = TrlParser((RLXConfig,)).parse_args_and_config([*CPU, "--config", str(file), "--beta", "0.1"])
    assert (args.plugins, args.beta) == ({"advantage": "grpo", "clip": {"name": "ppo", "eps_high": 0.28}}, 0.1)
    (args,) = TrlParser((RLXConfig,)).parse_args_and_config([*CPU, "--config", str(file), "--plugins", "clip=ppo"])
    assert args.plugins == {"clip": "ppo"}


def test_a_plugin_object_is_written_out_so_that_the_configuration_can_be_saved(tmp_path):
    args = config(tmp_path, plugins={"clip": rlx.create("clip", "ppo", eps_high=0.3)})
    assert args.plugins["clip"] == {"name": "ppo", "eps_low": 0.2, "eps_high": 0.3, "dual_clip": None}
    assert "eps_high" in args.to_json_string()


def _refusal(tmp_path, plugins, data=None, **changes):
    own = {name: changes.pop(name) for name in ("rollout_func", "tools") if name in changes}
    with pytest.raises(rlx.ConfigError) as refused:
        args = config(tmp_path, plugins=plugins, **changes)
        RLXTrainer("no/such-model", digits, args, data if data is not None else dataset(), **own)
    return str(refused.value)


@pytest.mark.parametrize(
    ("plugins", "changes", "words"),
    [
        ({"clipp": "ppo"}, {}, ["unknown kind 'clipp'", "did you mean 'clip'"]),
        ({"clip": "poo"}, {}, ["unknown clip 'poo'", "did you mean 'ppo'"]),
        ({"clip": {"name": "ppo", "eps_hihg": 1}}, {}, ["clip ppo", "'eps_hihg'", "eps_high"]),
        ({"clip": {"name": "ppo", "eps_high": "much"}}, {}, ["clip ppo.eps_high", "expected float"]),
        ({"clip": ["ppo", "ppo"]}, {}, ["clip takes one plug-in"]),
        ("advantage", {}, ["expected key=value"]),
        ({"clip": "ppo"}, {"loss_type": "cispo"}, ["loss_type='cispo'", "name an aggregate and a clip"]),
        ({"clip": "ppo"}, {"epsilon_high": 0.28}, ["epsilon_high=0.28", "clip.eps_high"]),
        ({"clip": "ppo"}, {"gradient_accumulation_steps": 4, "steps_per_generation": 2}, ["must divide", "= 2"]),
        ({"clip": "ppo"}, {"num_iterations": 2, "save_strategy": "steps", "save_steps": 3}, ["multiple of 2"]),
        ({"correction": "tis"}, {}, ["correction tis", "use_vllm=True"]),
        ({"pruner": "april"}, {}, ["pruner april", "generation_chunk=N"]),
        ({"method": "arpo"}, {}, ["allocator arpo", "'tools'", "TRL calls tools in its own generation only"]),
        ({"method": {"name": "resum", "phrase": [7]}}, {"use_vllm": True}, ["allocator resum", "set use_vllm=False"]),
        ({"sampler": "in_order"}, {"rollout_func": lambda prompts, trainer: {}}, ["sampler in_order", "rollout_func"]),
        ({"hint": "adaprefix"}, {}, ["hint adaprefix", "dataset column", "prompt, target"]),
    ],
)
def test_what_can_not_run_is_refused_before_the_model_is_loaded(tmp_path, plugins, changes, words):
    message = _refusal(tmp_path, plugins, **changes)
    assert all(word in message for word in words), message


def test_a_missing_signal_names_the_option_that_supplies_it(tmp_path, registered):
    @registered("advantage", "test_needs_ref")
    class NeedsReference(rlx.Advantage):
        requires = frozenset({"logp_ref"})

        def __call__(self, batch):
            return {"advantages": batch.logp_ref}

    assert "advantage test_needs_ref needs the signal 'logp_ref': set beta > 0" in _refusal(
        tmp_path, {"advantage": "test_needs_ref"}
    )


def test_a_sampler_needs_rows_by_index(tmp_path):
    assert "iterable (streaming)" in _refusal(tmp_path, {"sampler": "in_order"}, dataset().to_iterable_dataset())


def test_the_profile_claims_nothing_beyond_the_best_configuration(tmp_path):
    best = profile.host_profile(
        config(tmp_path, beta=0.1, generation_chunk=4, teacher_model="policy", prox_decay=0.5), dataset=dataset()
    )
    assert best.capabilities == profile.CAPABILITIES
    assert {"logp_ref", "logp_teacher", "logp_prox", "target"} <= best.signals and "values" not in best.signals


def test_what_trl_can_do_is_told_without_importing_it():
    code = "import sys, rlx_plugins.hosts.trl.profile as p; assert p.CAPABILITIES and 'trl' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(rlx.__file__).parents[1]).returncode == 0
