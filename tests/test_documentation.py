"""The plug-ins shown in the documentation register and run."""

import re
from pathlib import Path

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.core import registry
from rlx_plugins.testing.evaluation.building import run_loss

ROOT = Path(__file__).parents[1]
EXAMPLES = [
    pytest.param(path, code, id=f"{path}-{i}")
    for path in ("README.md", "docs/writing-a-plugin.md")
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.S))
    if "@rlx.register" in code
]


@pytest.mark.parametrize(("path", "code"), EXAMPLES)
def test_a_shown_plugin_registers_and_runs(path, code):
    kind, name = re.search(r'@rlx\.register\("(\w+)", "(\w+)"\)', code).groups()
    try:
        exec("from dataclasses import dataclass\nimport rlx_plugins as rlx\n" + code, {"__name__": "shown"})
        part = rlx.create(kind, name)
        if kind == "clip":
            given = {"logp_new": [[-1.0, -2.0]], "logp_old": [[-1.2, -2.0]], "advantages": [1.0]}
            out = run_loss({"clip": part}, response_mask=[[1, 1]], **given)
            assert torch.isfinite(out["loss"]) and out["grad_logp"].abs().sum() > 0
        else:
            group = rlx.Group("a#0", "a", [1])
            ctx = rlx.Context(0, 1, groups=1, group_size=2, max_tokens=4, prompts={"a": [1]})
            assert len(part.more([group], ctx)) == 2
            for r in group.rollouts:
                r.finish("eos")
                r.reward = 0.0
            assert len(part.more([group], ctx)) == 2
            assert part.more([group], ctx) == []
    finally:
        registry.forget(kind, name)


def test_the_documentation_shows_plugins():
    assert len(EXAMPLES) == 3
