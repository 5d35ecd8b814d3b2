from __future__ import annotations

import pytest

pytest.importorskip("trl")


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Path of an untrained tiny model."""
    from tests.hosts.trl.tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model"))
