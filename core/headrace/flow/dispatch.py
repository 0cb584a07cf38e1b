"""Trajectories → instances. Free-running: the least loaded instance that hosts the version. Lockstep: by id.

Invariant: a trajectory is given only to an instance that hosts the version it is pinned to, first time and every time
it is placed again.

Lockstep must not depend on timing. The first group of a version opens a *cohort*: the next ``batch_groups`` groups,
dealt over the instances of that moment, which all host the version, as trajectory id modulo their number. Who gets
how many is fixed then, so that an instance can start to decode when it has all of its share. When the fleet changes
inside a cohort, the instances that remain still get exactly their share, and so does one that drains: it leaves after
the cohort. Members dealt to an instance that was lost are unplaced and are placed again outside the cohort, by id
over the instances that are there then; one that joins waits for the next cohort.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headrace.flow.fleet import Fleet
from headrace.flow.instances import Instance


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """``groups``: those that belong to it. ``instances``: whom it is dealt to, by name."""

    version: int
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
        batch_groups: int,
        group_size: int,
        lockstep: bool,
    ) -> None:
        self._fleet = fleet
        self._batch_groups = batch_groups
        self._group_size = group_size
        self._lockstep = lockstep
        self._cohort: Cohort | None = None

    def can_start(self, version: int) -> bool:
        """Whether the fleet can take another group of ``version``."""
        if self._lockstep:
            if self._cohort is not None and self._cohort.version == version:
                return self._fleet.is_hosted(version)
            return self._fleet.is_hosted_everywhere(version)
        return self._fleet.room(version) is not None

    def can_fill(self, version: int) -> bool:
        """Whether an instance that hosts ``version`` has a slot to spare."""
        room = self._fleet.room(version)
        return room is not None and room.load < room.slots

    def start(self, group: int, trajectories: range, version: int) -> Cohort | None:
        """Place every member of a new group, for which there was room; returns its cohort."""
        if not self._lockstep:
            self._start_where_there_is_room(trajectories, version)
            return None
        cohort = self._cohort_of(group, version)
        for trajectory in trajectories:
            if cohort is None:
                self._fleet.place(trajectory, version, self._by_id(trajectory, version))
                continue
            dealt = cohort.instances[trajectory % len(cohort.instances)]
            self._fleet.place(trajectory, version, dealt if self._is_there(dealt, version) else None)
        if cohort is not None and group == cohort.groups[-1]:
            self._fleet.dealt = frozenset()
        return cohort

    def place_again(self, trajectory: int, version: int) -> Instance | None:
        """Put an unfinished trajectory on an instance that hosts its version; unplaced when none can take it."""
        self._fleet.remove(trajectory, version)
        instance = self._by_id(trajectory, version) if self._lockstep else self._fleet.room_again(version)
        self._fleet.place(trajectory, version, instance)
        return instance

    def end_cohort(self) -> None:
        """The next group opens a new cohort, although the version is the same."""
        self._cohort, self._fleet.dealt = None, frozenset()

    def _start_where_there_is_room(self, trajectories: range, version: int) -> None:
        """All members start, and only on instances that had room for one, so that none is ever more than a group above
        its mark, however the loads of the others stand."""
        given: dict[Instance, None] = {}
        for trajectory in trajectories:
            instance = self._fleet.room(version) or min(given, key=lambda instance: instance.order)
            given[instance] = None
            self._fleet.place(trajectory, version, instance)

    # ------------------------------------------------------------ lockstep

    def _cohort_of(self, group: int, version: int) -> Cohort | None:
        if self._cohort is None or self._cohort.version != version:
            self._cohort = self._open_cohort(range(group, group + self._batch_groups), version)
            self._fleet.dealt = frozenset(self._cohort.instances)
        return self._cohort if group in self._cohort.groups else None

    def _open_cohort(self, groups: range, version: int) -> Cohort:
        instances = tuple(self._staying(self._fleet.instances))
        trajectories = np.arange(groups.start * self._group_size, groups.stop * self._group_size)
        sizes = np.bincount(trajectories % len(instances), minlength=len(instances)).tolist()
        names = [instance.name for instance in instances]
        return Cohort(version=version, groups=groups, instances=instances, sizes=dict(zip(names, sizes, strict=True)))

    def _by_id(self, trajectory: int, version: int) -> Instance | None:
        hosting = self._fleet.hosting(version)
        hosting = self._staying(hosting) or hosting
        return hosting[trajectory % len(hosting)] if hosting else None

    def _staying(self, instances: list[Instance]) -> list[Instance]:
        return [instance for instance in instances if instance not in self._fleet.draining]

    def _is_there(self, instance: Instance, version: int) -> bool:
        return self._fleet.has(instance) and version in instance.hosted
