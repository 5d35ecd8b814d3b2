"""TRL 1.16 as a host: a `GRPOTrainer` subclass that carries every kind of plug-in, and its configuration.

    from rlx_plugins.hosts.trl import RLXConfig, RLXTrainer

    config = RLXConfig(output_dir="out", plugins={"advantage": "dvao", "clip": {"name": "bapo", "target": 1.0}})
    RLXTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=reward, args=config, train_dataset=dataset).train()

With no plug-in named, `RLXTrainer` is `GRPOTrainer`. TRL is imported when one of the two is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import RLXConfig
    from .trainer import RLXTrainer

__all__ = ["RLXConfig", "RLXTrainer"]


def __getattr__(name: str) -> Any:
    if name == "RLXConfig":
        from .config import RLXConfig

        return RLXConfig
    if name == "RLXTrainer":
        from .trainer import RLXTrainer

        return RLXTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
