from __future__ import annotations

import sys
from pathlib import Path

import pytest

import rlx_plugins as rlx
from rlx_plugins.core.registry import forget

pytest.importorskip("verl", reason="verl is not installed")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def registered():
    """`@registered(kind, name)`: as `rlx.register` above a plain class, undone after the test."""
    from dataclasses import dataclass

    names = []

    def register(kind, name):
        def decorate(cls):
            names.append((kind, name))
            return rlx.register(kind, name)(dataclass(cls))

        return decorate

    yield register
    for kind, name in names:
        forget(kind, name)
