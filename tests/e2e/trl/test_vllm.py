"""Real vLLM generating for the rollout program: its log-probs reach the correction, its likeliest tokens the clip."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm")


@pytest.fixture
def model(tmp_path):
    """An untrained model whose heads are wide enough for vLLM's CPU attention."""
    from rlx_plugins.testing.tiny_model import build_tiny_model, build_tiny_tokenizer

    tokenizer = build_tiny_tokenizer()
    shape = {"hidden_size": 64, "layers": 2, "intermediate_size": 64, "heads": 2}
    for part in (tokenizer, build_tiny_model(tokenizer, **shape)):
        part.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_correction_and_clip_see_what_the_engine_reports_in_every_round(model, script, tmp_path, monkeypatch):
    # VERL_PLATFORM=cpu: vLLM's CPU build then keeps its weights, so that they can be loaded again after an update
    cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VERL_PLATFORM": "cpu"}
    for name, value in cpu.items():
        monkeypatch.setenv(name, value)
    assert script("colocated_vllm.py", model, tmp_path) == 0
    history = [row for row in json.loads((tmp_path / "history.json").read_text()) if "loss" in row]
    assert len(history) == 3
    for row in history:
        assert 0.9 < row["rlx/correction/tis/weight_mean"] < 1.1
        assert row["rlx/correction/tis/effective_sample_size"] > 0.9
    assert any(row["rlx/correction/tis/weight_mean"] != 1.0 for row in history)  # engine and trainer do differ
    assert all(0 < row["rlx/clip/divergence"] < 0.01 for row in history)
    for row in json.loads((tmp_path / "off.json").read_text()):
        assert row["own"] < 1e-5 and 0.1 < row["listed"] < 1 and row["asked"] == 0
        assert 0 < row["policy"] < 0.05  # vLLM's arithmetic, not the trainer's
