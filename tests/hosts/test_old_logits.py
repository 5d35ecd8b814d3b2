"""The exact ways to missing old log-probs: what each finds, what is missing, and what it costs."""

import pytest
import torch

from rlx_plugins.core.errors import DataError
from rlx_plugins.hosts.old_logits import Snapshots, StepTime
from rlx_plugins.testing import evaluate

VERSIONS = [[2, 2, 3, 4, -1], [0, 4, 4, 1, 2], [3, 3, 3, 3, 3]]
MASK = [[1, 1, 1, 1, 0], [1, 1, 0, 1, 1], [0, 0, 0, 0, 0]]


def run(strategy="snapshot", keep=8, **changes):
    table = -torch.rand(5, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.1
    inputs = {"token_version": VERSIONS, "response_mask": MASK, "logp_table": table, "current_version": 4} | changes
    return evaluate("system", "old_logits", inputs, {"strategy": strategy, "keep": keep}), inputs["logp_table"]


@pytest.mark.parametrize("strategy", ["snapshot", "dedicated", "interrupt"])
@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_exact_values_are_those_of_the_version_that_wrote_the_token(strategy, keep):
    out, table = run(strategy, keep)
    versions, mask = torch.tensor(VERSIONS), torch.tensor(MASK).bool() & (torch.tensor(VERSIONS) >= 0)
    there = mask & ((versions > 4 - keep) | (strategy == "interrupt"))
    want = table.gather(0, versions.clamp(min=0)[None])[0]
    torch.testing.assert_close(out["logp_old"], torch.where(there, want, 0.0))
    assert torch.equal(out["exact"].bool(), there)
    assert out["missing"] == int((mask & ~there).sum())
    assert out["stored_copies"] == (0 if strategy == "interrupt" else keep)


def test_versions_may_be_given_as_the_staleness_of_the_tokens():
    by_version, _ = run(keep=2)
    by_staleness, _ = run(keep=2, token_version=None, staleness=(4 - torch.tensor(VERSIONS)).tolist())
    assert by_version["missing"] == by_staleness["missing"] == 5
    for name in ("logp_old", "exact"):
        torch.testing.assert_close(by_staleness[name], by_version[name])


def test_what_is_missing_falls_with_the_copies_kept_and_pausing_misses_nothing():
    missing = [run(keep=k)[0]["missing"] for k in (1, 2, 3, 4, 5)]
    assert missing == [6, 5, 2, 1, 0]
    assert run("interrupt", keep=1)[0]["missing"] == 0


def test_the_cost_of_each_route():
    time = StepTime(switch=7, forward=1, train=10, gpu_split=0.25, pause=2)
    assert time.of("snapshot", [2, 3, 4], 4) == 2 * 7 + 3 + 10
    assert time.of("snapshot", [4], 4) == 1 + 10, "on-policy: one forward, no switch"
    assert time.of("snapshot", [], 4) == 10
    assert time.of("dedicated", [2, 3, 4], 4) == 3 * 8 / 0.25
    assert time.of("dedicated", [], 4) == pytest.approx(10 / 0.75)
    assert time.of("interrupt", [0, 1, 2, 3, 4], 4) == 2 + 1 + 10


def test_masked_rows_and_tokens_of_no_version_are_neither_exact_nor_missing():
    out, _ = run(response_mask=[[0] * 5] * 3)
    assert not out["exact"].any() and out["missing"] == 0 and out["versions_needed"] == []
    assert out["logp_old"].shape == (3, 5) and not out["logp_old"].any()


def test_garbage_in_a_versions_pass_over_other_tokens_is_not_read():
    table = torch.full((5, 3, 5), torch.nan).double()
    for b in range(3):
        for t in range(5):
            table[VERSIONS[b][t], b, t] = -1.0
    out, _ = run(logp_table=table)
    assert torch.equal(out["logp_old"], -out["exact"].double())


def test_a_version_from_the_future_is_an_error():
    with pytest.raises(DataError, match="policy version 4, but the current one is 3"):
        run(current_version=3)


def test_snapshots_hold_the_last_versions():
    kept = Snapshots(3)
    for version in range(6):
        kept.store(version, f"weights {version}")
    assert sorted(kept.weights) == [3, 4, 5]
    with pytest.raises(ValueError, match="keep"):
        Snapshots(0)
