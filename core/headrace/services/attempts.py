"""How often each trajectory has been tried, and which tasks are not tried again.

Invariant: a trajectory is started at most ``max_attempts`` times; the task of one that never succeeded is in quarantine
and no later group gets it.
"""

from __future__ import annotations

from collections.abc import Iterable


class Attempts:
    """Remembers only trajectories that failed at least once and whose group is outstanding."""

    def __init__(self, max_attempts: int) -> None:
        self._max = max_attempts
        self._failed: dict[int, int] = {}
        self.quarantine: set[int] = set()
        """Task indices."""

    def current(self, trajectory: int) -> int:
        """The number of the present try, from 0."""
        return self._failed.get(trajectory, 0)

    def failed(self, trajectory: int) -> bool:
        """The present try came to nothing; whether there is another one."""
        tries = self._failed[trajectory] = self.current(trajectory) + 1
        return tries < self._max

    def forget(self, trajectories: Iterable[int]) -> None:
        """Their group is not outstanding any more."""
        for trajectory in trajectories:
            self._failed.pop(trajectory, None)
