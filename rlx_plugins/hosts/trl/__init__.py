"""TRL 1.16 as a host: a `GRPOTrainer` subclass that carries every kind of plug-in, and its configuration.

    from rlx_plugins.hosts.trl import RLXConfig, RLXTrainer

    config = RLXConfig(output_dir="out", plugins={"advantage": "dvao", "clip": {"name": "bapo", "target": 1.0}})
    RLXTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=reward, args=config, train_dataset=dataset).train()

With no plug-in named, `RLXTrainer` is `GRPOTrainer`.
"""

from .config import RLXConfig
from .trainer import RLXTrainer

__all__ = ["RLXConfig", "RLXTrainer"]
