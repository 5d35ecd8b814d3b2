"""Real processes: the same rows on one rank and on two, in one micro-batch and in several; killed and resumed."""

from __future__ import annotations

import json

import pytest
import torch


@pytest.fixture(scope="module")
def spread(model, script, tmp_path_factory):
    out = tmp_path_factory.mktemp("spread")
    script("spread_rows.py", model, out)
    script("spread_rows.py", model, out, ranks=2)
    return out


@pytest.mark.parametrize("run", ["update", "signals", "program"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 1), (2, 3)])
def test_the_update_does_not_depend_on_how_rows_are_spread(spread, run, ranks, micro_batches):
    together = torch.load(spread / f"{run}-1-1.pt", weights_only=True)
    apart = torch.load(spread / f"{run}-{ranks}-{micro_batches}.pt", weights_only=True)
    assert apart["losses"] == pytest.approx(together["losses"], abs=2e-6)
    for name, weight in together["weights"].items():
        torch.testing.assert_close(apart["weights"][name], weight, atol=1e-6, rtol=0)
    for expected, found in zip(together["logs"], apart["logs"]):
        told = [k for k in expected if k.startswith("rlx/") and "clip" not in k]  # shares of a micro-batch
        assert [found[k] for k in told] == pytest.approx([expected[k] for k in told], abs=1e-4, rel=1e-5)


def test_deepspeed_zero_2_trains_like_ddp(spread, model, script):
    pytest.importorskip("deepspeed")
    script("spread_rows.py", model, spread, 2, ranks=2)
    for run in ("update", "program"):
        ddp = torch.load(spread / f"{run}-2-3.pt", weights_only=True)
        sharded = torch.load(spread / f"{run}-2-3-zero.pt", weights_only=True)
        assert sharded["losses"] == pytest.approx(ddp["losses"], abs=2e-6)
        for name, weight in ddp["weights"].items():
            torch.testing.assert_close(sharded["weights"][name], weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("how", "messages"),
    [
        ("hook", ["ZeroDivisionError: no groups left", "RLXError: the rollout program failed on rank 0: ZeroDivision"]),
        ("nan", ["DataError: logp_new is NaN on a model token in step 0 on another rank", "first for prompt"]),
    ],
)
def test_a_failure_on_one_rank_ends_the_run_on_both(model, script, tmp_path, how, messages):
    assert script("failing.py", model, tmp_path, how, ranks=2) == 0
    for rank, message in enumerate(messages):
        assert message in (tmp_path / f"{rank}.txt").read_text()


def test_a_run_killed_and_resumed_is_the_run(model, script, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert script("resumable.py", model, whole) == 0
    assert script("resumable.py", model, killed, 11) == -9
    assert (killed / "checkpoint-8").is_dir() and not (killed / "weights.pt").exists()
    assert script("resumable.py", model, killed) == 0
    assert json.loads((killed / "logs.json").read_text()) == json.loads((whole / "logs.json").read_text())
    assert json.loads((killed / "state.json").read_text()) == json.loads((whole / "state.json").read_text())
    expected = torch.load(whole / "weights.pt", weights_only=True)
    for name, weight in torch.load(killed / "weights.pt", weights_only=True).items():
        assert torch.equal(weight, expected[name])
