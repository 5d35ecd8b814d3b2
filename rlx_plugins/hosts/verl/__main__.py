"""`python -m rlx_plugins.hosts.verl`: verl's `main_ppo` with the plug-ins' trainer modes and configuration.

Mistakes in the configuration are told before Ray starts; the trainer is imported in verl's driver process only.
"""

from __future__ import annotations

import sys
from typing import Any

import hydra

from ...core.errors import RLXError


@hydra.main(config_path="config", config_name="rlx_trainer", version_base=None)
def main(config: Any) -> None:
    """verl's main function: check the configuration, then run the trainer in a Ray actor."""
    try:
        launch(config)
    except RLXError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def launch(config: Any) -> None:
    """Check `config` and train; raises ConfigError before anything is started."""
    import verl  # noqa: F401  (loads VERL_USE_EXTERNAL_MODULES, where plug-ins of one's own may be)

    from .budget import TokenBudget
    from .profile import options
    from .settings import check_engine, make_parts, read_plugins, trainer_mode, without_critic

    trainer_mode(config)
    plugins = read_plugins(config)
    TokenBudget.of(options(config), plugins=bool(plugins))
    if plugins:
        make_parts(config)
        without_critic(config)
    check_engine(config)
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    auto_set_device(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    run_ppo(config, task_runner_class=task_runner(ray, TaskRunnerV1))


def task_runner(ray: Any, stock: Any) -> Any:
    """verl's task runner, whose process registers the trainer modes before it looks one up."""

    class RLXTaskRunner(stock.__ray_metadata__.modified_class.__ray_actor_class__):
        def run(self, config: Any) -> None:
            from . import trainer  # noqa: F401  (registers the modes)

            super().run(config)

    return ray.remote(RLXTaskRunner)


if __name__ == "__main__":
    main()
