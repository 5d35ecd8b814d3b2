"""Trains the tiny model on the tiny task with verl, without an accelerator.

    python -m rlx_plugins.hosts.verl.cpu 'rlx.plugins="advantage=dvao clip=bapo"'
    python -m rlx_plugins.hosts.verl.cpu --stock --replica vllm --steps 10

Everything else on the command line is a Hydra override of verl and comes last.
"""

from __future__ import annotations

import argparse
import os
import sys

from ....testing.tiny_model import tiny_model_path
from .settings import REPLICAS, cpu_environment, cpu_overrides
from .tiny import tiny_files


def command(arguments: list[str]) -> list[str]:
    """The command line of the run that ``arguments`` ask for."""
    parser = argparse.ArgumentParser("python -m rlx_plugins.hosts.verl.cpu", description="verl on the CPU, in small")
    parser.add_argument("--replica", choices=REPLICAS, default="hf", help="what generates: transformers or vLLM")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--stock", action="store_true", help="verl itself, without the plug-ins' trainer")
    given, extra = parser.parse_known_args(arguments)
    module = "verl.trainer.main_ppo" if given.stock else "rlx_plugins.hosts.verl"
    overrides = cpu_overrides(tiny_model_path(), *tiny_files(), replica=given.replica, steps=given.steps, extra=extra)
    return [sys.executable, "-m", module, *overrides]


def main() -> None:
    """Hands over to the run."""
    run = command(sys.argv[1:])
    os.execve(sys.executable, run, {**os.environ, **cpu_environment()})


if __name__ == "__main__":
    main()
