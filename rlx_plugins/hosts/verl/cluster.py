"""Wait for the nodes of a Ray cluster.

    python -m rlx_plugins.hosts.verl.cluster ADDRESS NODES ARGUMENTS...

waits until NODES nodes have joined the cluster at ADDRESS, which is on this machine, and becomes `python ARGUMENTS...`.
"""

from __future__ import annotations

import os
import sys
import time

from ...core.errors import RLXError

TIMEOUT = 600.0
"""Seconds that the nodes have to join."""


def wait_for_nodes(address: str, nodes: int, timeout: float = TIMEOUT) -> None:
    """Return when `nodes` nodes are alive; RLXError says how many are after `timeout` seconds."""
    import ray

    deadline, told, alive = time.monotonic() + timeout, -1, 0
    connected = False
    try:
        while time.monotonic() < deadline:
            if not connected:
                connected = _connect(address)
            if connected:
                alive = sum(node["Alive"] for node in ray.nodes())
            if alive != told:
                told = alive
                print(f"{alive} of {nodes} nodes have joined the Ray cluster", flush=True)
            if alive >= nodes:
                return
            time.sleep(1.0)
    finally:
        ray.shutdown()
    raise RLXError(f"after {timeout:.0f} s {alive} of {nodes} nodes have joined the Ray cluster at {address}")


def _connect(address: str) -> bool:
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except ConnectionError:  # the head is not up yet
        return False
    return True


def main() -> None:
    """Entry point of the module."""
    address, nodes, *arguments = sys.argv[1:]
    try:
        wait_for_nodes(address, int(nodes))
    except RLXError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
