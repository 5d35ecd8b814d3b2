"""verl's replay buffer, asking more often than every two seconds whether the rollouts of a step are there."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

__all__ = ["EagerReplayBuffer"]


class EagerReplayBuffer(ReplayBuffer):
    """The stock buffer of ``trainer_mode=sync``; ``sampler_kwargs.poll_interval`` is in seconds.

    verl offers the interval as a constructor argument only. A buffer of one's own gets no ``filter_groups`` settings.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.poll_interval = float(self.sampler_kwargs.get("poll_interval", 0.05))
