"""Trajectories → instances. Free-running: the least loaded instance that hosts the version. Lockstep: by id.

Invariant: a trajectory is given only to an instance that hosts the version it is pinned to, first time and every time
it is placed again.

Lockstep must not depend on timing. The first group opens a *cohort*: the groups that are admitted at that moment,
dealt over the instances that are there, which all host the version, as trajectory id modulo their number. Who gets how
many is fixed then, so that an instance can start to decode when it has all of its share. What is admitted later, in
the place of groups that were dropped, is a cohort of its own, and waits until nothing is in flight. When the fleet
changes inside a cohort, the instances that remain still get exactly their share, and so does one that drains: it leaves
after the cohort. Members dealt to an instance that was lost are unplaced and are placed again outside the cohort, by id
over the instances that are there then; one that joins waits for the next cohort.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from headrace.flow.fleet import Fleet
from headrace.flow.instances import Instance


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """``groups``: those that belong to it. ``instances``: whom it is dealt to, by name."""

    groups: range
    instances: tuple[Instance, ...]
    sizes: Mapping[str, int]
    """Trajectories that each instance gets in all."""


class Dispatch:
    """Reads the fleet and places trajectories on it."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        group_size: int,
        lockstep: bool,
    ) -> None:
        self._fleet = fleet
        self._group_size = group_size
        self._lockstep = lockstep
        self._cohort: Cohort | None = None

    def can_start(self, group: int, version: int, *, idle: bool) -> bool:
        """Whether the fleet can take another group of ``version``, with this id. ``idle``: nothing is in flight."""
        if not self._lockstep:
            return self._fleet.room(version) is not None
        if self._cohort is not None and group in self._cohort.groups:
            return self._fleet.is_hosted(version)
        return idle and self._fleet.is_hosted_everywhere(version)

    def can_fill(self, version: int) -> bool:
        """Whether an instance that hosts ``version`` has a slot to spare."""
        room = self._fleet.room(version)
        return room is not None and room.load < room.slots

    def start(self, group: int, trajectories: range, version: int, *, admitted: int) -> Cohort | None:
        """Place every member of a new group, for which there was room; returns its cohort. ``admitted``: how many
        groups may start now, this one included."""
        if not self._lockstep:
            self._start_where_there_is_room(trajectories, version)
            return None
        cohort = self._cohort
        if cohort is None or group not in cohort.groups:
            cohort = self._cohort = self._open_cohort(range(group, group + admitted))
            self._fleet.dealt = frozenset(cohort.instances)
        for trajectory in trajectories:
            dealt = cohort.instances[trajectory % len(cohort.instances)]
            self._fleet.place(trajectory, version, dealt if self._is_there(dealt, version) else None)
        if group == cohort.groups[-1]:
            self._fleet.dealt = frozenset()
        return cohort

    def place_again(self, trajectory: int, version: int, *, versions: Iterable[int]) -> Instance | None:
        """Put an unfinished trajectory on an instance that can take it under one of ``versions``, the first that will
        do; unplaced, under its own ``version``, when there is none."""
        fleet = self._fleet
        fleet.remove(trajectory)
        for under in versions:
            instance = self._by_id(trajectory, under) if self._lockstep else fleet.room_again(under)
            if instance is not None:
                fleet.place(trajectory, under, instance)
                return instance
        fleet.place(trajectory, version, None)
        return None

    def _start_where_there_is_room(self, trajectories: range, version: int) -> None:
        """All members start, and only on instances that had room for one, so that none is ever more than a group above
        its mark, however the loads of the others stand."""
        given: dict[Instance, None] = {}
        for trajectory in trajectories:
            instance = self._fleet.room(version) or min(given, key=lambda instance: instance.order)
            given[instance] = None
            self._fleet.place(trajectory, version, instance)

    # ------------------------------------------------------------ lockstep

    def _open_cohort(self, groups: range) -> Cohort:
        instances = tuple(self._staying(self._fleet.instances))
        trajectories = np.arange(groups.start * self._group_size, groups.stop * self._group_size)
        sizes = np.bincount(trajectories % len(instances), minlength=len(instances)).tolist()
        names = [instance.name for instance in instances]
        return Cohort(groups=groups, instances=instances, sizes=dict(zip(names, sizes, strict=True)))

    def _by_id(self, trajectory: int, version: int) -> Instance | None:
        hosting = self._fleet.hosting(version)
        hosting = self._staying(hosting) or hosting
        return hosting[trajectory % len(hosting)] if hosting else None

    def _staying(self, instances: list[Instance]) -> list[Instance]:
        return [instance for instance in instances if instance not in self._fleet.draining]

    def _is_there(self, instance: Instance, version: int) -> bool:
        return self._fleet.has(instance) and version in instance.hosted
