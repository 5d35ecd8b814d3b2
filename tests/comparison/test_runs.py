"""The processes of a comparison: crashes, interruptions, reuse. A small script stands in for `rlx run`."""

import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import rlx_plugins as rlx
from rlx_plugins.comparison import runs as module
from rlx_plugins.comparison.compare import Comparison
from rlx_plugins.comparison.runs import Planned, execute, identity, locked
from rlx_plugins.recipes.run_folder import RunFolder, write_json
from rlx_plugins.recipes.schema import load, with_overrides

ROOT = Path(__file__).parents[2]

STAND_IN = textwrap.dedent(
    """
    import json, pathlib, sys, time, yaml
    words = sys.argv[1:]
    folder = pathlib.Path(words[words.index("--output") + 1])
    seed = int(words[words.index("--seed") + 1])
    recipe = yaml.safe_load(open(words[1]))
    folder.joinpath("recipe.json").write_text(json.dumps({"recipe": recipe, "profile": "tiny", "seed": seed}))
    folder.joinpath("calls").open("a").write(" ".join(w for w in words if w in ("--resume", "--overwrite")) + "\\n")
    behaviour = recipe["title"]
    if behaviour in ("refused", "diverged"):
        kind = "ConfigError" if behaviour == "refused" else "DataError"
        folder.joinpath("failure.json").write_text(json.dumps({"error": f"{kind}: no"}))
        sys.exit(2)
    if behaviour == "crash":
        sys.exit("error: it broke")
    if behaviour == "slow":
        folder.joinpath("checkpoints", "checkpoint-1").mkdir(parents=True, exist_ok=True)
        if "--resume" not in words:
            time.sleep(60)
    folder.joinpath("metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}) + "\\n")
    folder.joinpath("summary.json").write_text(json.dumps({"reward_last": 0.5 + seed}))
    """
)


@pytest.fixture
def plan(tmp_path, recipe_file, monkeypatch):
    """A function that plans a run whose process behaves as its title says."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    command = Planned.command
    monkeypatch.setattr(
        Planned, "command", lambda self: [sys.executable, str(script), *command(self)[3:]], raising=True
    )

    def make(behaviour="good", seed=0):
        recipe = load(recipe_file).model_copy(update={"title": behaviour})
        planned = Planned(behaviour, recipe, "tiny", seed, tmp_path / "out" / behaviour / f"seed-{seed}")
        planned.write_recipe()
        return planned

    return make


def run(*planned, jobs=2):
    said = []
    execute(planned, jobs=jobs, tell=said.append, pause=0.02)
    return said


def calls(planned):
    return (planned.folder / "calls").read_text().splitlines()


def test_runs_are_made_once_and_reused(plan):
    a, b = plan(seed=0), plan(seed=1)
    run(a, b)
    assert (a.state(), b.read().summary) == ("finished", {"reward_last": 1.5})
    assert run(a, b) == ["good seed 0: finished before", "good seed 1: finished before"]
    assert calls(a) == [""]


def test_a_crash_is_recorded_with_its_error_and_not_run_again(plan):
    crash, good = plan("crash"), plan()
    run(crash, good)
    assert (crash.state(), good.state()) == ("failed", "finished")
    assert crash.read().failure == "exit code 1: error: it broke"
    assert run(crash) == ["crash seed 0: failed before"]
    assert len(calls(crash)) == 1


def test_a_refused_configuration_ends_the_comparison_and_is_no_crash(plan):
    refused = plan("refused")
    with pytest.raises(rlx.ConfigError, match="refused seed 0 was refused: ConfigError: no"):
        run(refused)
    assert refused.state() == "half"


def test_an_error_of_the_training_is_a_crash(plan):
    diverged = plan("diverged")
    run(diverged)
    assert diverged.read().failure == "exit code 2: DataError: no"


def test_an_interrupted_run_goes_on_from_its_checkpoint(plan):
    slow = plan("slow")
    process = slow.start(os.environ).process
    while not (slow.folder / "checkpoints" / "checkpoint-1").exists():
        time.sleep(0.02)
    assert slow.state() == "running"
    process.kill()
    process.wait()
    assert slow.state() == "half"
    assert run(slow) == ["slow seed 0: resumed", "slow seed 0: finished"]
    assert calls(slow) == ["", "--resume"]


def test_a_half_run_without_a_checkpoint_starts_again(plan):
    good = plan()
    write_json_recipe(good)
    run(good)
    assert calls(good) == ["--overwrite"]


def write_json_recipe(planned):
    planned.folder.mkdir(parents=True)
    setting = {"recipe": planned.recipe.model_dump(mode="json"), "profile": "tiny", "seed": planned.seed}
    write_json(RunFolder(planned.folder).recipe, setting)


def test_a_run_that_a_killed_comparison_left_is_waited_for(plan):
    slow = plan("slow")
    process = slow.start(os.environ).process
    while not (slow.folder / "checkpoints" / "checkpoint-1").exists():
        time.sleep(0.02)
    threading.Timer(0.3, lambda: (process.kill(), process.wait())).start()
    said = run(slow)
    assert said == [
        "slow seed 0: still running since an earlier call",
        "slow seed 0: resumed",
        "slow seed 0: finished",
    ]


def test_ctrl_c_stops_the_runs_and_records_no_failure(plan, monkeypatch):
    slow = plan("slow")

    def interrupt(seconds):
        if (slow.folder / "checkpoints" / "checkpoint-1").exists():
            raise KeyboardInterrupt
        pause(seconds)

    pause = time.sleep
    monkeypatch.setattr(module.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(slow)
    assert slow.state() == "half"


def test_a_run_that_was_told_to_stop_has_not_crashed(plan):
    slow = plan("slow")
    running = slow.start(os.environ)
    while not (slow.folder / "checkpoints" / "checkpoint-1").exists():
        time.sleep(0.02)
    running.process.send_signal(signal.SIGTERM)
    running.process.wait()
    with pytest.raises(KeyboardInterrupt):
        running.ended()
    assert slow.state() == "half"


def test_a_crash_that_the_run_itself_recorded_counts_and_an_interruption_does_not(plan):
    good = plan()
    write_json_recipe(good)
    write_json(RunFolder(good.folder).failure, {"error": "KeyboardInterrupt: "})
    assert good.state() == "half"
    write_json(RunFolder(good.folder).failure, {"error": "ValueError: bad"})
    assert (good.state(), good.read().failure) == ("failed", "ValueError: bad")


def test_a_folder_with_another_run_is_refused_with_the_difference(plan):
    good = plan()
    run(good)
    other = Planned(good.arm, good.recipe.model_copy(update={"plugins": {"clip": "ppo"}}), "tiny", 0, good.folder)
    with pytest.raises(rlx.ConfigError, match=r"holds another run \(plugins: .*dvao.* there, .*ppo.* wanted\)"):
        other.state()


def test_another_title_is_the_same_run(plan):
    good = plan()
    run(good)
    renamed = good.recipe.model_copy(update={"title": "Another", "papers": ["x"]})
    assert Planned(good.arm, renamed, "tiny", 0, good.folder).state() == "finished"


@pytest.mark.parametrize("name", ["quickstart", "quickstart-verl", "lead", "resum"])
def test_a_recipe_that_is_written_for_the_runs_is_the_same_recipe(name, tmp_path):
    recipe = with_overrides(load(ROOT / "recipes" / f"{name}.yaml"), [], "tiny")
    planned = Planned(name, recipe, "tiny", 0, tmp_path / "seed-0")
    planned.write_recipe()
    again = Planned(name, with_overrides(load(planned.recipe_file), [], "tiny"), "tiny", 0, tmp_path / "seed-0")
    assert identity(again.setting) == identity(planned.setting)


def test_two_comparisons_do_not_run_in_one_folder(tmp_path):
    with locked(tmp_path), pytest.raises(rlx.ConfigError, match="another comparison is running"):
        with locked(tmp_path):
            pass


def test_a_comparison_is_planned_run_and_continued(recipe_file, tmp_path, plan):
    def compare(*words, resume=False, **options):
        planned = Comparison.plan([f"a={recipe_file}", f"b={recipe_file}:clip=ppo", *words], output=out, **options)
        planned.open(resume=resume)
        planned.execute(jobs=2, tell=said.append)
        return planned.report(command="rlx compare")

    out, said = tmp_path / "compared", []
    results = compare(seeds="2")
    assert (results.metric, results.seeds, [o.paired.mean for o in results.outcomes]) == ("reward", [0, 1], [0.0])
    assert said[0] == "a seed 0: started"  # seed by seed: whole pairs first
    assert (out / "report.html").exists() and (out / "a" / "seed-1" / "summary.json").exists()
    with pytest.raises(rlx.ConfigError, match="already holds a comparison; use --resume"):
        compare(seeds="2")
    said.clear()
    compare(seeds="2", resume=True)
    assert all(line.endswith("finished before") for line in said)
    with pytest.raises(rlx.ConfigError, match=r"planned otherwise \(seeds\)"):
        compare(seeds="3", resume=True)
    with pytest.raises(rlx.ConfigError, match=r"planned otherwise \(arms\)"):
        compare(f"c={recipe_file}:clip=bapo", seeds="2", resume=True)


def test_runs_that_exist_are_collected_with_their_own_seeds(make_run, tmp_path):
    for seed in (3, 5):
        make_run("a", seed, 0.5)
        make_run("b", seed, 0.6 + 0.01 * seed)
    made = tmp_path / "made"
    planned = Comparison.plan([str(made / "a"), str(made / "b")], output=tmp_path / "out")
    planned.open(resume=False)
    assert planned.runs_to_make() == []
    results = planned.report()
    assert (results.seeds, results.outcomes[0].paired.n) == ([3, 5], 2)
    with pytest.raises(rlx.ConfigError, match="--set: there is no recipe to run"):
        Comparison.plan([str(made / "a"), str(made / "b")], overrides=["max_steps=3"])


def test_runs_of_one_arm_must_be_of_one_setting(make_run, tmp_path):
    make_run("a", 0)
    make_run("a", 1, plugins={"clip": "ppo"})
    make_run("b", 0)
    made = tmp_path / "made"
    with pytest.raises(rlx.ConfigError, match="arm a: its runs differ in plugins"):
        Comparison.plan([str(made / "a"), str(made / "b")])
