"""Entry point of group `verl.plugins`: every advantage and clip of the library under `rlx.<name>` in verl's registries.

It is loaded by every process that imports verl, so it is light and changes nothing: a method is imported when one of
its names is first called, and the CPU platform is set only where the environment chooses it. verl hides what goes
wrong while it loads a plug-in; therefore the names are registered whatever happens, and say what failed when called.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from ...core.errors import ConfigError
from ...core.registry import builtin_names
from .settings import FLAG_PREFIX

logger = logging.getLogger(__name__)

failures: list[str] = []
"""What went wrong while this module was loaded; `rlx doctor` shows it."""


@dataclass(frozen=True)
class AdvantageFlag:
    """`algorithm.adv_estimator=rlx.<name>`, as verl calls it."""

    name: str

    def __call__(self, **given: Any) -> Any:
        refuse_failures()
        from .flags import advantages

        return advantages(self.name, **given)


@dataclass(frozen=True)
class ClipFlag:
    """`actor_rollout_ref.actor.policy_loss.loss_mode=rlx.<name>`, as verl calls it."""

    name: str

    def __call__(self, **given: Any) -> Any:
        refuse_failures()
        from .flags import clipped_loss

        return clipped_loss(self.name, **given)


def refuse_failures() -> None:
    """Raise ConfigError with what went wrong while the plug-in was loaded."""
    if failures:
        raise ConfigError(f"rlx-plugins could not be loaded into verl: {'; '.join(failures)} (see `rlx doctor`)")


def load() -> None:
    """Choose the platform, then register the names; both are tried whatever happens to the other."""
    errors: list[Exception] = []
    for step in (_choose_platform, _register):
        try:
            step()
        except Exception as error:  # another version of verl may raise anything here
            errors.append(error)
            failures.append(f"{type(error).__name__}: {error}")
            logger.error("rlx-plugins could not be loaded into verl: %s", failures[-1])
    if errors:
        raise errors[0]


def _choose_platform() -> None:
    from .cpu.adjustments import activate

    activate()


def _register() -> None:
    from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

    for name in sorted(builtin_names("advantage")):
        register_adv_est(f"{FLAG_PREFIX}{name}")(AdvantageFlag(name))
    for name in sorted(builtin_names("clip")):
        register_policy_loss(f"{FLAG_PREFIX}{name}")(ClipFlag(name))


load()
