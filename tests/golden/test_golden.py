"""Worked examples of the papers' mathematics, float64, six digits: `<kind>__<name>.json` has the cases of a method."""

import json
import math
from pathlib import Path

import pytest
import torch

from rlx_plugins.testing import evaluate

CASES = [
    pytest.param(*path.stem.split("__", 1), case, id=f"{path.stem}-{i}")
    for path in sorted(Path(__file__).parent.glob("*__*.json"))
    for i, case in enumerate(json.loads(path.read_text()))
]


@pytest.mark.parametrize(("kind", "name", "case"), CASES)
def test_worked_example(kind, name, case):
    got = evaluate(kind, name, case["inputs"], case.get("params", {}))
    for result, expected in case["expected"].items():
        assert result in got, f"{kind} {name} does not return {result!r}; it returns {sorted(got)}"
        assert_close(got[result], expected, result)


def assert_close(got, expected, where):
    if isinstance(got, torch.Tensor):
        got = got.tolist()
    if isinstance(expected, dict):
        assert set(expected) <= set(map(str, got)), where
        named = {str(k): v for k, v in got.items()}
        for key, value in expected.items():
            assert_close(named[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(got) == len(expected), f"{where}: {got} against {expected}"
        for i, (g, e) in enumerate(zip(got, expected, strict=True)):
            assert_close(g, e, f"{where}[{i}]")
    elif isinstance(expected, bool) or isinstance(expected, str):
        assert got == expected, where
    elif expected is None or (isinstance(expected, float) and math.isnan(expected)):
        assert got is None or math.isnan(got), where
    else:
        assert got == pytest.approx(expected, abs=2e-6, rel=2e-6), where
