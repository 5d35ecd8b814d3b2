"""Which hosts there are, which are installed in which version, and whether the seams used in them hold.

Nothing here imports a host until its seams are asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Host:
    """A host the library knows.

    distribution  the package that must be installed, None for a simulated host
    tested        the versions the seams were tested with, as in setup.cfg
    module        its sub-package: `<module>.profile.CAPABILITIES` is all it can ever do (importing it imports no host),
                  `<module>.seams.check_seams()` lists what no longer fits in the installed version
    """

    distribution: str | None
    tested: str
    module: str

    def capabilities(self) -> frozenset[str]:
        """Everything the host can do in its best configuration."""
        found: frozenset[str] = importlib.import_module(f"{self.module}.profile").CAPABILITIES
        return found


HOSTS = {
    "trl": Host("trl", ">=1.16,<1.17", "rlx_plugins.hosts.trl"),
    "verl": Host("verl", ">=0.9.1,<0.10", "rlx_plugins.hosts.verl"),
    "table": Host(None, "built in", "rlx_plugins.hosts.table"),
}


@dataclass
class HostReport:
    """What `rlx doctor` says about a host."""

    version: str | None
    tested: str
    seams: str
    problems: list[str] = field(default_factory=list)


def inspect_host(name: str) -> HostReport:
    """Version and seams of a host; a host that is not installed is not a problem."""
    host = HOSTS[name]
    if host.distribution is None:
        return HostReport("built in", host.tested, "no seams")
    try:
        version = importlib.metadata.version(host.distribution)
    except importlib.metadata.PackageNotFoundError:
        return HostReport(None, host.tested, "-")
    problems = []
    if not _within(version, host.tested):
        problems.append(f"version {version} is outside the tested range {host.tested}")
    try:
        with _quiet():
            check: Callable[[], list[str]] = importlib.import_module(f"{host.module}.seams").check_seams
            problems += check()
    except Exception as error:  # a broken installation may raise anything on import
        problems.append(f"can't be imported: {type(error).__name__}: {error}")
    return HostReport(version, host.tested, "hold" if not problems else f"{len(problems)} broken", problems)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without a host's warnings about accelerators and engines it does not find: the seams may hold all the same."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _within(version: str, tested: str) -> bool:
    """Whether `version` lies in a range written as ">=1.16,<1.17"."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())

    low, high = (bound.lstrip("<>=") for bound in tested.split(","))
    return numbers(low) <= numbers(version) < numbers(high)
