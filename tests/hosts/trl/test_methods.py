"""Methods of every kind, and a mix of them, in a real run of a few steps."""

from __future__ import annotations

import math

import pytest
import torch
from trl_tiny import dataset, logs, run

from rlx_plugins.hosts.trl.checkpoint import FILE


def engine_with_log_probs(prompts, trainer):
    """A rollout_func in vLLM's place: fixed answers with log-probs that are not the trainer's."""
    answers = [[20 + (i * j) % 60 for j in range(1, 4 + i % 4)] for i in range(len(prompts))]
    prompt_ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": answers, "logprobs": [[-4.5] * len(a) for a in answers]}


CHOICES = {
    "sampler": ({"sampler": "vade"}, {}),
    "allocator": ({"allocator": "vigor"}, {}),
    "allocator in rounds": ({"allocator": "pilot_commit"}, {}),
    "hint as a prefix": ({"hint": "adaprefix"}, {}),
    "hint that is trained": ({"hint": {"name": "adaprefix", "imitate": True}, "selector": "adhint"}, {}),
    "hint in a second round": ({"method": "adhint"}, {}),
    "hint as context": ({"method": "guide", "hint": {"name": "guide", "success_threshold": 5.0}}, {}),
    "pruner that ends generation": ({"pruner": "april"}, {"generation_chunk": 3}),
    "pruner that looks": ({"pruner": {"name": "arrol", "length": 4}}, {}),
    "replay": ({"method": "rollout_replay"}, {}),
    "reward and advantage": ({"method": "lead"}, {}),
    "correction": ({"correction": "tis"}, {"rollout_func": engine_with_log_probs}),
    "selector that cuts rows": ({"selector": "nat_rpc"}, {}),
    "aggregate": ({"aggregate": "seq_mean_token_sum_norm"}, {}),
    "ratio": ({"ratio": "sequence", "aggregate": "seq_mean_token_mean"}, {}),
    "clip of micro scope": ({"clip": "bapo"}, {}),
    "a mix": ({"allocator": "vigor", "advantage": "dvao", "clip": "bapo", "selector": "nat_urs"}, {}),
}


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
@pytest.mark.parametrize("choice", CHOICES)
def test_a_method_trains_and_its_state_can_be_read_back(model, tmp_path, choice):
    plugins, settings = CHOICES[choice]
    data = dataset(hint=["12"] * 24, solution=["12345"] * 24)
    t = run(
        model,
        tmp_path,
        plugins=plugins,
        train_dataset=data,
        num_iterations=2,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=2,
        **settings,
    )
    assert all(math.isfinite(row["loss"]) for row in logs(t)) and len(logs(t)) == 4
    assert max(row["grad_norm"] for row in logs(t)) > 1e-4
    saved = torch.load(tmp_path / "checkpoint-4" / FILE, weights_only=True)
    t.parts.load_state_dict(saved)
    assert repr(t.parts.state_dict()) == repr(saved)
