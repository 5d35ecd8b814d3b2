"""A run with vLLM in the trainer's process: arguments are the model's path and a folder for the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trl_tiny import run

PLUGINS = {
    "advantage": "dvao",
    "correction": {"name": "tis", "upper": 1.5},
    "allocator": {"name": "vigor", "rounds": 2},
    "clip": "bapo",
}


def main(model: str, folder: Path) -> None:
    t = run(
        model,
        folder,
        plugins=PLUGINS,
        max_steps=3,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.05,
        vllm_max_model_length=64,
    )
    (folder / "history.json").write_text(json.dumps(t.state.log_history))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
