"""Unfinished trajectories that are bound for another instance: moves that were decided and are not done."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from headrace.flow.instances import Instance
from headrace.flow.records import Move


class _Way(NamedTuple):
    version: int
    source: Instance
    target: Instance


class Bound:
    """Every question costs O(1), but for the first :meth:`moves` after a change."""

    def __init__(self) -> None:
        self._ways: dict[int, _Way] = {}
        self._moves: tuple[Move, ...] | None = ()
        """Those, unless one changed since."""
        self._leaving: Counter[tuple[Instance, int]] = Counter()
        self._coming: Counter[tuple[Instance, int]] = Counter()
        """Instance and version → trajectories; only what is above 0."""

    def __contains__(self, trajectory: int) -> bool:
        return trajectory in self._ways

    def add(self, trajectory: int, version: int, source: Instance, target: Instance) -> None:
        """It is bound for ``target``, and was for nowhere."""
        self._ways[trajectory] = _Way(version, source, target)
        self._leaving[source, version] += 1
        self._coming[target, version] += 1
        self._moves = None

    def take(self, trajectory: int) -> tuple[int, Instance]:
        """It is bound for nowhere any more. Returns its version and where it was bound for."""
        version, source, target = self._ways.pop(trajectory)
        for counter, instance in ((self._leaving, source), (self._coming, target)):
            counter[instance, version] -= 1
            if not counter[instance, version]:
                del counter[instance, version]
        self._moves = None
        return version, target

    def is_giving(self, instance: Instance, version: int) -> bool:
        """Whether a trajectory of a version is to leave an instance."""
        return (instance, version) in self._leaving

    def is_taking(self, instance: Instance, version: int) -> bool:
        """Whether a trajectory of a version is to come to an instance."""
        return (instance, version) in self._coming

    def moves(self) -> tuple[Move, ...]:
        """All, by trajectory; the very same tuple while nothing changes."""
        if self._moves is None:
            self._moves = tuple(_move(trajectory, self._ways[trajectory]) for trajectory in sorted(self._ways))
        return self._moves


def _move(trajectory: int, way: _Way) -> Move:
    return Move(
        trajectory=trajectory,
        version=way.version,
        source=way.source.name,
        target=way.target.name,
        with_state=way.source.migrates and way.target.migrates,
    )
