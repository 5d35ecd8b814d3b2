"""The simulated host: every part of a training step without a model, in milliseconds, and in few enough lines to read.

    from rlx_plugins.hosts.table import TableTrainer

    trainer = TableTrainer({"advantage": "grpo", "pruner": "april"}, groups=4)
    trainer.run(10)
    print(trainer.log[-1]["reward"])

policy.py   a table of next-token logits instead of a network, and the reward
engine.py   `Generate` and `Abort`: one token per running row and tick
host.py     the dataset, `Forward`, log-probabilities
critic.py   a table of values, for estimators with a critic
profile.py  what the host supplies and can do
trainer.py  one training step from prompts to feedback, checkpoints
"""

from .engine import TableEngine
from .host import TableHost
from .policy import BAD, CALL, EOS, GOOD, TablePolicy
from .profile import PROFILE
from .trainer import TableTrainer

__all__ = ["BAD", "CALL", "EOS", "GOOD", "PROFILE", "TableEngine", "TableHost", "TablePolicy", "TableTrainer"]
