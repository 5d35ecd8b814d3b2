"""For tests, ours and third parties': run a method on its canonical inputs, a tabular policy, tiny models and tasks."""

from .conformance import check_plugin
from .evaluation import evaluate

__all__ = ["check_plugin", "evaluate"]
