"""Whether every node of a job is in its Ray cluster: `python -m mrl.placement.joined ADDRESS TIMEOUT_S NODE...`."""

import sys
import time
from collections.abc import Callable, Collection

import ray

LOOK_S = 0.5  # between looks


def missing(expected: Collection[str], alive: Callable[[], Collection[str]], timeout_s: float) -> list[str]:
    """Names of nodes that are not alive by then; none as soon as all are."""
    end = time.monotonic() + timeout_s
    while (left := set(expected).difference(alive())) and time.monotonic() < end:
        time.sleep(LOOK_S)
    return [name for name in expected if name in left]


def _alive_in(address: str) -> Callable[[], set[str]]:
    """A look at the cluster, with which this process is connected at the first that succeeds."""

    def look() -> set[str]:
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError):  # it is not up yet
            return set()
        return {node["NodeName"] for node in ray.nodes() if node["Alive"]}

    return look


def main(argv: list[str]) -> int:
    """Entry point; the exit status is 0 when all are there."""
    address, timeout_s, *nodes = argv
    begun = time.monotonic()
    if left := missing(nodes, _alive_in(address), float(timeout_s)):
        sys.stdout.write(
            f"{len(left)} of {len(nodes)} nodes are not in the Ray cluster at {address} after {timeout_s} s: {', '.join(left)}; "
            "logs/ray_NODE.log in the run's folder says what each did.\n"
        )
        return 1
    sys.stdout.write(f"{len(nodes)} nodes are in the Ray cluster at {address} after {time.monotonic() - begun:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
