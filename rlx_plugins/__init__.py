"""rlx-plugins: methods of RL post-training papers as plug-ins for unmodified verl and TRL.

    import rlx_plugins as rlx

    rlx.create("clip", "bapo", target=1.0)        # a built-in by name

    @rlx.register("clip", "hard")                 # your own
    @dataclass
    class Hard(rlx.Clip):
        eps: float = rlx.param(0.1, gt=0)

        def __call__(self, terms):
            return rlx.clipped_surrogate(terms.ratio, terms.advantages, 1 - self.eps, 1 + self.eps)

Importing this package needs torch only and imports no host.
"""

from .core.batch import RolloutBatch, pack
from .core.config import Parts, build, parse_overrides
from .core.context import Context
from .core.errors import ConfigError, DataError, MissingSignal, RegistrationError, RLXError
from .core.host import HostProfile
from .core.kinds import (
    KINDS,
    Advantage,
    Aggregate,
    Allocator,
    Auxiliary,
    Clip,
    Correction,
    Distill,
    Drafter,
    Hint,
    Method,
    Plugin,
    Pruner,
    Quant,
    Ratio,
    Replay,
    Reward,
    Sampler,
    Selector,
    Temperature,
)
from .core.objective import policy_loss
from .core.operations import Abort, Forward, Generate, Restore, Unlearn
from .core.params import param
from .core.preparation import Prepared, prepare
from .core.registry import create, find, names, register
from .core.rollout import drive, rollout_program
from .core.segments import Segments
from .core.state import state
from .core.terms import PolicyTerms, clip_fraction, clipped_surrogate, masked, masked_mean
from .core.trajectory import Group, Rollout, Segment

__version__ = "0.1.0"

__all__ = [
    "KINDS",
    "Abort",
    "Advantage",
    "Aggregate",
    "Allocator",
    "Auxiliary",
    "Clip",
    "ConfigError",
    "Context",
    "Correction",
    "DataError",
    "Distill",
    "Drafter",
    "Forward",
    "Generate",
    "Group",
    "Hint",
    "HostProfile",
    "Method",
    "MissingSignal",
    "Parts",
    "Plugin",
    "PolicyTerms",
    "Prepared",
    "Pruner",
    "Quant",
    "RLXError",
    "Ratio",
    "RegistrationError",
    "Replay",
    "Restore",
    "Reward",
    "Rollout",
    "RolloutBatch",
    "Sampler",
    "Segment",
    "Segments",
    "Selector",
    "Temperature",
    "Unlearn",
    "build",
    "clip_fraction",
    "clipped_surrogate",
    "create",
    "drive",
    "find",
    "masked",
    "masked_mean",
    "names",
    "pack",
    "param",
    "parse_overrides",
    "policy_loss",
    "prepare",
    "register",
    "rollout_program",
    "state",
]
