"""Run folders made by hand, and a recipe file."""

from __future__ import annotations

import json

import pytest

from rlx_plugins.comparison.runs import read_run
from rlx_plugins.recipes.run_folder import RunFolder, write_json

RECIPE = """\
name: sample
title: A sample
host: trl
plugins: {advantage: dvao}
profiles:
  tiny:
    rewards: [accuracy, format]
    weights: [1, 0.25]
    arguments: {max_steps: 20}
"""


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "sample.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def make_run(tmp_path):
    """A function that writes the folder of a run and reads it back."""

    def make(
        arm,
        seed,
        accuracy=0.5,
        *,
        steps=20,
        tokens=100,
        prompts=None,
        weights="aa",
        plugins=None,
        finished=True,
        crash=None,
        **profile,
    ):
        folder = RunFolder.open(tmp_path / "made" / arm / f"seed-{seed}")
        chosen = {"model": "tiny", "task": "tiny", "rewards": ["accuracy"], "arguments": {"max_steps": steps}} | profile
        recipe = {"name": arm, "title": arm, "host": "trl", "plugins": plugins or {}, "profiles": {"tiny": chosen}}
        write_json(folder.recipe, {"recipe": recipe, "profile": "tiny", "seed": seed, "rlx_plugins": "0.1.0"})
        for i in range(1, steps + 1):
            key = f"{seed}.{i}" if prompts is None else prompts[i - 1]
            folder.log(
                {
                    "step": i,
                    "reward": accuracy * i / steps,
                    "generated_tokens": tokens * i,
                    "update_tokens": 2 * tokens * i,
                    "seconds": 0.5 * i,
                    "rlx/prompts": hash(key) % 2**48,
                }
            )
        if finished:
            summary = {"steps": steps, "reward_last": accuracy, "accuracy_after": accuracy, "initial_weights": weights}
            write_json(folder.summary, summary)
        if crash:
            (folder.path / "crash.json").write_text(json.dumps({"exit_code": 1, "message": crash}))
        return read_run(folder.path)

    return make
