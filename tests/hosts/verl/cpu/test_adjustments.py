"""What changes in a process of verl when the environment chooses the CPU, and that nothing does otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")

ROOT = Path(__file__).parents[4]
REPORT = """
import json, sys
import torch
import torch.distributed, torch.distributed.fsdp
original = torch.distributed.init_process_group, torch.distributed.fsdp.CPUOffloadPolicy
import verl
from verl.plugin.platform import get_platform
from verl.utils import device, import_utils
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutReplicaRegistry
from rlx_plugins.hosts.verl.cpu import activate

def critic_attention():
    import tempfile
    from transformers import LlamaConfig, LlamaForTokenClassification
    from verl.utils.model import load_valuehead_model

    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForTokenClassification(config).save_pretrained(folder)
        return load_valuehead_model(folder, torch.float32, config, False).config._attn_implementation

report = {"active": activate(), "again": activate(), "platform": type(get_platform()).__name__}
report["replica"] = "rlx_hf" in RolloutReplicaRegistry._registry
now = torch.distributed.init_process_group, torch.distributed.fsdp.CPUOffloadPolicy
report["untouched"] = [a is b for a, b in zip(original, now)]
if report["active"]:
    torch.distributed.init_process_group(
        "cpu:gloo,cpu:gloo", rank=0, world_size=1, init_method="tcp://127.0.0.1:0"
    )
    report["backend"] = torch.distributed.get_backend()
    report["pinned"] = torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=True).pin_memory
    report["trl"] = import_utils.is_trl_available()
    report["critic"] = critic_attention()
    report["device"] = [device.get_device_name(), device.get_device_id(), device.get_resource_name()]
    report["memory"] = device.get_torch_device().max_memory_allocated() > 0
    report["random"] = device.get_torch_device().get_rng_state().numel() > 0
    report["classes"] = [get_rollout_class("rlx_hf").__name__, RolloutReplicaRegistry.get("rlx_hf").__name__]
print(json.dumps(report))
"""


def report(**environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    environment = {**clean, "PYTHONPATH": str(ROOT), "VERL_USE_EXTERNAL_PLUGINS": "none", **environment}
    done = subprocess.run([sys.executable, "-c", REPORT], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_cpu_process_gets_all_that_verl_needs():
    assert report(VERL_PLATFORM="cpu") == {
        "active": True,
        "again": True,
        "platform": "CpuPlatform",
        "replica": True,
        "untouched": [False, False],
        "backend": "cpu:gloo",
        "pinned": False,
        "trl": False,
        "critic": "sdpa",
        "device": ["cpu", "cpu", "GPU"],
        "memory": True,
        "random": True,
        "classes": ["TransformersAdapter", "TransformersReplica"],
    }


def test_nothing_changes_unless_the_cpu_is_chosen():
    found = report()
    assert found["platform"] != "CpuPlatform"
    assert not found["active"] and not found["replica"]
    assert found["untouched"] == [True, True]
