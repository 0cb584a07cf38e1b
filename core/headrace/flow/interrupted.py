"""The rollout instances where the policy interrupts trajectories.

Invariant: what is unfinished on an instance is under the newest version that it hosts, and an unplaced trajectory waits
for no version.
"""

from __future__ import annotations

from collections.abc import Collection

from headrace.flow.fleet import Fleet
from headrace.flow.instances import Instance


class InterruptedFleet(Fleet):
    """A trajectory goes on under each newer version that its instance commits."""

    interrupts = True

    @property
    def awaited(self) -> Collection[int]:
        return ()

    def _take_up(self, instance: Instance, version: int) -> None:
        for older in [placed for placed in instance.unfinished if placed < version]:
            for trajectory in list(instance.unfinished[older]):
                self._discard(instance, older, trajectory)
                self._add(instance, version, trajectory)
                self._where[trajectory] = version, instance
