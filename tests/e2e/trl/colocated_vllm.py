"""A run with vLLM in the trainer's process: arguments are the model's path and a folder for the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from trl_tiny import run

from rlx_plugins.hosts.trl import RLXTrainer
from rlx_plugins.hosts.trl.forward import likeliest

PLUGINS = {
    "advantage": "dvao",
    "correction": {"name": "tis", "upper": 1.5},
    "allocator": {"name": "vigor", "rounds": 2},
    "clip": {"name": "pdm", "denominator": "logp_old"},
}


class Trainer(RLXTrainer):
    """Notes how far what vLLM reports is from the policy's own log-probs at the temperature of sampling."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.off: list[dict[str, float]] = []

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        batch = self._prepared
        policy, reported = likeliest(self, out), batch.rollout_top_logp
        off = (policy["rollout_top_logp"][: batch.size] - reported).abs().amax(-1)
        sampled = batch.rollout_top_ids == batch.response_ids[..., None]
        own = (reported - batch.logp_rollout[..., None])[sampled & batch.response_mask[..., None]]
        row = {"policy": float(off[batch.response_mask].max()), "own": float(own.abs().max())}
        listed = float(sampled.any(-1)[batch.response_mask].float().mean())
        self.off.append(row | {"listed": listed, "asked": float(self.vllm_generation.logprobs)})
        return out


def main(model: str, folder: Path) -> None:
    t = run(
        model,
        folder,
        cls=Trainer,
        plugins=PLUGINS,
        temperature=0.8,
        max_steps=3,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.05,
        vllm_max_model_length=64,
    )
    (folder / "history.json").write_text(json.dumps(t.state.log_history))
    (folder / "off.json").write_text(json.dumps(t.off))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
