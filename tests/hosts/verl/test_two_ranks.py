"""Two FSDP2 ranks on gloo give the gradient of one, and the hidden states of the model itself."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import two_ranks
from training_worker import ROWS, language_model, own_states

HERE = Path(__file__).parent


@pytest.mark.parametrize("clip", ["ppo", "gmpo"])
def test_two_ranks_equal_one(tmp_path, clip):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, str(HERE / "two_ranks.py")]
    env_path = {"PYTHONPATH": f"{HERE.parents[2]}:{HERE}"}
    import os

    processes = [
        subprocess.Popen([*command, str(rank), str(port), str(tmp_path), clip], env={**os.environ, **env_path})
        for rank in (0, 1)
    ]
    assert [p.wait(timeout=200) for p in processes] == [0, 0]
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    model = two_ranks.Table()
    plugins = {"clip": clip, "advantage": "dvao", "aggregate": "seq_mean_token_mean"}
    losses = two_ranks.update(plugins, 0, 1, model)
    gradient = model.logits.grad
    assert float(gradient.abs().sum()) > 0.1
    for rank in saved:
        torch.testing.assert_close(rank["gradient"], gradient, atol=1e-9, rtol=0)
    expected = own_states(language_model(), ROWS)
    for states in zip(*(rank["states"] for rank in saved)):
        torch.testing.assert_close(torch.cat(states), expected, atol=1e-5, rtol=0)
    assert sum(saved[0]["losses"] + saved[1]["losses"]) / 2 == pytest.approx(sum(losses), abs=1e-9)
