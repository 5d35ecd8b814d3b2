"""By what a run was made: a hash of this package's code, and the versions of what it ran on."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = {"trl": ("trl", "transformers", "torch"), "verl": ("verl", "transformers", "torch")}


def provenance(host: str) -> dict[str, Any]:
    """`code`: 12 hex digits of the package's sources; `versions`: Python and the host's packages."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES.get(host, ("torch",)):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {"code": code_hash(), "versions": versions}


def code_hash() -> str:
    """12 hex digits that change with any Python source of the package."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
