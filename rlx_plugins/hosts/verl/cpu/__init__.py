"""verl without an accelerator: a real verl run, with vLLM or with transformers generating, on any machine.

verl has no platform for the CPU. This package adds one, with the few adjustments verl and vLLM's CPU build then need.
All of it is off unless the environment chooses it with ``VERL_PLATFORM=cpu``; ``activate`` is called by the entry
point of group ``verl.plugins``, so verl itself and its worker processes stay unmodified.

``adjustments``  what is changed in verl's and vLLM's processes, each with its reason
``device``       the platform
``replica``      a rollout server on transformers, ``actor_rollout_ref.rollout.name=rlx_hf``: starts without vLLM
``settings``     the environment and the Hydra overrides of such a run
``sampler``      verl's replay buffer, asking more often than every two seconds
``tiny``         the tiny task as parquet files and as a reward function
``__main__``     such a run from the command line
"""

from __future__ import annotations

from .adjustments import activate, is_chosen
from .settings import cpu_environment, cpu_overrides

__all__ = ["activate", "cpu_environment", "cpu_overrides", "is_chosen"]
