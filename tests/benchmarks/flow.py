"""What a dispatch decision costs, and whether the size of the fleet matters to it.

    python tests/benchmarks/flow.py [--json] [--group-size 8] [--cycles 2000]

One cycle is the life of a group in a fleet that is busy: its ticket, which places every member on the least loaded
instance, and for each member the news that its tokens are done and that its row is stored. Seconds are this process's
CPU seconds: other work on the machine must not count. The fleets take turns, so that whatever drifts drifts for all of
them. Figures are medians, per trajectory; ``ratio``: the largest fleet's cost by the smallest one's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque

from headrace.flow import Flow
from headrace_staleness.multi_version import MultiVersion

FLEETS = (100, 1_000, 10_000)
SLOTS = 8
MOST_MICROSECONDS = 30.0
MOST_RATIO = 1.5


class BusyFleet:
    """Every instance is at half of its slots; groups finish in the order in which they started."""

    def __init__(self, instances: int, *, group_size: int) -> None:
        groups = instances * SLOTS // (2 * group_size)
        policy = MultiVersion(MultiVersion.Settings(max_staleness=2))
        self._flow = Flow(policy=policy, batch_groups=1_000_000, group_size=group_size)
        for number in range(instances):
            self._flow.join(f"instance-{number:05}", slots=SLOTS, live_versions=2, versions=(0,))
        self._playing: deque[tuple[int, ...]] = deque()
        for _ in range(groups):
            self._start()

    def _start(self) -> None:
        ticket = self._flow.next_ticket()
        assert ticket is not None, "the fleet has room and the policy admits"
        self._playing.append(ticket.trajectories)

    def cycle(self) -> None:
        """A group finishes and another one starts."""
        self._start()
        for trajectory in self._playing.popleft():
            self._flow.generated(trajectory)
            assert self._flow.stored(trajectory, version=0, tokens=100, nbytes=800)


def measure(fleets: tuple[int, ...], *, group_size: int, cycles: int) -> dict[str, float]:
    """Microseconds per trajectory, by the number of instances, and the ratio."""
    busy = {instances: BusyFleet(instances, group_size=group_size) for instances in fleets}
    took: dict[int, list[float]] = {instances: [] for instances in fleets}
    for _ in range(cycles):
        for instances, fleet in busy.items():
            started = time.process_time_ns()
            fleet.cycle()
            took[instances].append((time.process_time_ns() - started) / 1000 / group_size)
    medians = {f"{instances}": statistics.median(costs) for instances, costs in took.items()}
    return {**medians, "ratio": medians[f"{fleets[-1]}"] / medians[f"{fleets[0]}"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--cycles", type=int, default=2000)
    arguments = parser.parse_args()
    found = measure(FLEETS, group_size=arguments.group_size, cycles=arguments.cycles)
    if arguments.json:
        print(json.dumps({"microseconds_per_trajectory": found, "group_size": arguments.group_size}))
    else:
        for instances in FLEETS:
            print(f"{instances:>6} instances: {found[str(instances)]:5.1f} µs per trajectory")
        print(f"ratio {found['ratio']:.2f} (at most {MOST_RATIO}), at most {MOST_MICROSECONDS:.0f} µs")
    slow = max(found[str(instances)] for instances in FLEETS) > MOST_MICROSECONDS
    return int(slow or found["ratio"] > MOST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
