"""For tests, ours and third parties': run a method on its canonical inputs, a tabular policy, tiny models and tasks."""

from .evaluation import evaluate

__all__ = ["evaluate"]
