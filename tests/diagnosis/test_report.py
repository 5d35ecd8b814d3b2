"""`rlx diagnose` on a run folder."""

import json

import pytest

from rlx_plugins.recipes.run_folder import RunFolder, write_json


@pytest.fixture
def folder(tmp_path):
    made = RunFolder.open(tmp_path / "run")
    profiles = {"tiny": {"rewards": ["accuracy"]}}
    recipe = {"name": "x", "title": "x", "host": "trl", "plugins": {}, "profiles": profiles}
    write_json(made.recipe, {"recipe": recipe, "profile": "tiny", "seed": 0})
    return made


def test_found_healthy_and_not_measured_are_three_lists(folder, command):
    for step in (1, 2):
        folder.log({"step": step, "rlx/groups/all_fail": 0.6, "completions/clipped_ratio": 0.0})
    code, out, _ = command("diagnose", str(folder.path))
    assert code == 0
    assert "all_fail" in out and "hint=guide" in out and "rlx/groups/all_fail 0.6, step 2" in out
    assert "try, best first: hint, sampler, allocator" in out
    code, out, _ = command("diagnose", str(folder.path), "--json")
    got = json.loads(out)
    assert [f["id"] for f in got["flags"]] == ["all_fail"]
    assert got["flags"][0]["severity"] == pytest.approx(1.0)
    assert [h["id"] for h in got["healthy"]] == ["truncation"]
    assert len(got["not_measured"]) == 13 and all(entry["reason"] for entry in got["not_measured"])
    assert got["try_kinds"][0] == {"kind": "hint", "stage": "G"}


def test_a_healthy_run_has_nothing_found(folder, command):
    folder.log({"step": 1, "rlx/groups/all_fail": 0.1})
    _, out, _ = command("diagnose", str(folder.path))
    assert "nothing found among what was measured" in out


def test_a_folder_without_metrics_is_refused(folder, tmp_path, command):
    for path, message in ((folder.path, "it has no metrics yet"), (tmp_path / "none", "no metrics.jsonl")):
        code, _, err = command("diagnose", str(path))
        assert code == 2 and message in " ".join(err.split())
