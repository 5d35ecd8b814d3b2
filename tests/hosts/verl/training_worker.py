"""verl's training worker around a model of the tests: its own inference pass, without Ray and configuration files."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.distributed.fsdp import fully_shard
from verl.plugin.platform import platform_manager
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker

from rlx_plugins.hosts.verl.cpu.device import CpuPlatform

ROWS = [[5], [7, 3, 9, 2, 8, 6, 4, 1], [4, 4], [1, 2, 3, 4, 5], [9, 8, 7], [2, 6, 1, 3], [8, 8, 8, 8, 8, 8], [3, 1]]


def on_the_cpu(monkeypatch=None):
    """Let verl take the CPU for its accelerator, until the test ends where `monkeypatch` is given."""
    if monkeypatch is None:
        platform_manager._current_platform = CpuPlatform()
    else:
        monkeypatch.setattr(platform_manager, "_current_platform", CpuPlatform())


def language_model(**config):
    """A small Llama in float32 with its own output head, the same one every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, initializer_range=0.3, **sizes, **config)).eval()


@torch.no_grad()
def own_states(model, rows):
    """[N,H]: the model's last hidden state at the last token of each row, one row at a time."""
    made = [model(input_ids=torch.tensor([row]), output_hidden_states=True).hidden_states[-1][0, -1] for row in rows]
    return torch.stack(made)


def shard(model, mesh):
    """FSDP2 as verl applies it: every layer, then the whole."""
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def worker_of(module, *, packed=True, tokens=None, rows=1, loss_fn=None):
    """A process of verl's with its actor, micro-batches of `rows` rows or, where given, up to `tokens` tokens."""
    engine = object.__new__(FSDPEngineWithLMHead)
    engine.module, engine.mode, engine._autocast_dtype = module, None, torch.float32
    engine.ulysses_sequence_parallel_size, engine.use_ulysses_sp = 1, False
    engine.ulysses_device_mesh = engine.ulysses_parallel_group = None
    engine.pad_to_length, engine._is_offload_param, engine._is_offload_optimizer = False, False, False
    engine.engine_config = SimpleNamespace(
        use_dynamic_bsz=tokens is not None,
        infer_max_token_len_per_gpu=tokens,
        infer_micro_batch_size_per_gpu=rows,
        use_fused_kernels=False,
        forward_only=False,
        fsdp_size=torch.distributed.get_world_size(),
    )
    training = object.__new__(TrainingWorker)
    training.engine, training.engine_config, training.loss_fn = engine, engine.engine_config, loss_fn
    training.model_config, training.flops_counter, training.device_name = {"use_remove_padding": packed}, None, "cpu"
    return SimpleNamespace(worker_dict={"actor_rollout": SimpleNamespace(actor=training)})
