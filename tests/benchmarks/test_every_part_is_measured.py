"""The benchmarks have the signals of every built-in part: a new part that reads another one is added to their batch."""

import importlib
import sys
from pathlib import Path

import pytest

from rlx_plugins.core.registry import builtin_names

FOLDER = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, FOLDER)
    yield {name: importlib.import_module(name) for name in ("_batch", "advantages", "objective", "preparation")}
    sys.path.remove(FOLDER)


@pytest.fixture(scope="module")
def batch(scripts):
    return scripts["_batch"].scored_batch(48, 64)


def test_the_batch_has_ragged_groups_turns_forks_and_hints(batch):
    sizes = batch.groups.sizes
    assert batch.size == 48 and len(set(sizes.tolist())) > 1
    assert int(batch.turn_ids.max()) > 0 and bool(batch.hint_mask.any())
    assert any(r.tag.startswith("fork:") for r in batch.rollout) and bool(batch.helped.bool().any())


def test_every_advantage_runs(scripts, batch):
    calls = scripts["advantages"].estimators(batch)
    assert set(calls) == builtin_names("advantage")
    for call in calls.values():
        call()


def test_every_clip_and_ratio_runs(scripts, batch):
    objective = scripts["objective"]
    chosen, new = objective.configurations(), objective.moved(batch)
    assert builtin_names("clip") | {f"ratio {name}" for name in builtin_names("ratio")} <= set(chosen)
    for config in chosen.values():
        objective.loss_and_gradient(config, batch, new)()


def test_every_part_of_the_batch_phase_runs(scripts, batch):
    preparation = scripts["preparation"]
    calls = preparation.preparations(batch)
    assert set(calls) == {f"{kind} {name}" for kind in preparation.KINDS for name in builtin_names(kind)}
    for call in calls.values():
        call.restore()
        call()
