from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny matrices: more threads only wait for each other
pytest.importorskip("trl")
sys.path.insert(0, str(Path(__file__).parent))  # trl_tiny, for the tests here and in tests/e2e/trl


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Path of an untrained tiny model."""
    from trl_tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def registered():
    """`rlx.register` with @dataclass, undone after the test."""
    from dataclasses import dataclass

    import rlx_plugins as rlx
    from rlx_plugins.core.registry import forget

    made = []

    def register(kind, name):
        made.append((kind, name))
        return lambda cls: rlx.register(kind, name)(dataclass(cls))

    yield register
    for kind, name in made:
        forget(kind, name)
