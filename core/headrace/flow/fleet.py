"""The rollout instances: which versions each hosts, and which unfinished trajectories are placed where.

A trajectory is *unfinished* until its tokens are done. Invariant: a placed trajectory is on an instance that hosts its
version; when that stops being true (the instance left, or lost the version) the trajectory is *unplaced*, kept under
its version, and named to the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from headrace.contract import Array


@dataclass(slots=True, eq=False)
class Instance:
    """One inference engine replica."""

    name: str
    slots: int
    """Trajectories it decodes at once."""
    live_versions: int
    """Versions it can host at once."""
    hosted: set[int]
    unfinished: dict[int, set[int]] = field(default_factory=dict)
    """Version → trajectories placed here; no empty sets."""
    load: int = 0
    """Trajectories placed here."""
    index: int = 0
    """Its place in the arrays of the fleet."""

    @property
    def share(self) -> float:
        """Load per slot."""
        return self.load / self.slots

    def is_idle_on(self, version: int) -> bool:
        """Whether no unfinished trajectory is placed here under ``version``."""
        return version not in self.unfinished


class Fleet:
    """``lookahead``: an instance is given new work while its load is below ``slots * lookahead``."""

    def __init__(self, *, lookahead: float) -> None:
        if lookahead <= 0:
            raise ValueError(f"lookahead is a factor above 0, got {lookahead}")
        self.members = 0
        """Changes when an instance joins or leaves."""
        self.touched: set[Instance] = set()
        """Instances that host other versions, or became idle or busy on one, since whoever reads this cleared it."""
        self.unplaced: dict[int, set[int]] = {}
        """Version → unfinished trajectories that are on no instance; no empty sets."""
        self._lookahead = lookahead
        self._instances: dict[str, Instance] = {}
        self._where: dict[int, Instance] = {}
        self._sorted: list[Instance] | None = None
        self._share: Array = np.zeros(0)
        self._hosts: dict[int, Array] = {}

    # ------------------------------------------------------------ instances

    def join(self, name: str, *, slots: int, live_versions: int, versions: Collection[int]) -> None:
        """A new instance that already hosts ``versions``."""
        if name in self._instances:
            raise ValueError(f"instance {name!r} is known already; it must leave before it joins again")
        if slots < 1 or live_versions < 1 or len(set(versions)) > live_versions:
            raise ValueError(
                f"instance {name!r}: {slots} slots and {live_versions} live versions are both at least 1 "
                f"and cannot host {sorted(versions)}"
            )
        self._instances[name] = Instance(name=name, slots=slots, live_versions=live_versions, hosted=set(versions))
        self._sorted = None
        self.members += 1

    def leave(self, name: str) -> tuple[int, ...]:
        """An instance is gone; returns its unfinished trajectories, now unplaced, ascending."""
        instance = self._instance(name)
        displaced = self._displace(instance, list(instance.unfinished))
        del self._instances[name]
        self.touched.discard(instance)
        self._sorted = None
        self.members += 1
        return displaced

    def commit(self, name: str, version: int) -> tuple[int, ...]:
        """An instance serves ``version``. One that hosts a single version at a time has thereby dropped the other;
        returns the trajectories that were unfinished under it, now unplaced."""
        instance = self._instance(name)
        if version in instance.hosted:
            return ()
        replaced = list(instance.hosted) if instance.live_versions == 1 else []
        if len(instance.hosted) - len(replaced) >= instance.live_versions:
            raise ValueError(
                f"instance {name!r} committed version {version} beside {sorted(instance.hosted)}; "
                f"it said that it hosts {instance.live_versions}"
            )
        displaced = [trajectory for old in replaced for trajectory in self.retire(name, old)]
        instances = self.instances
        instance.hosted.add(version)
        self._hosts.setdefault(version, np.zeros(len(instances), dtype=np.bool_))[instance.index] = True
        self.touched.add(instance)
        return tuple(displaced)

    def retire(self, name: str, version: int) -> tuple[int, ...]:
        """An instance no longer serves ``version``; returns what was unfinished under it there, now unplaced."""
        instance = self._instance(name)
        if version not in instance.hosted:
            return ()
        displaced = self._displace(instance, [version])
        if self._sorted is not None:
            self._hosts[version][instance.index] = False
            if not self._hosts[version].any():
                del self._hosts[version]
        self.touched.add(instance)
        return displaced

    @property
    def instances(self) -> list[Instance]:
        """By name. The arrays are rebuilt here after instances joined or left, once for all of them."""
        if self._sorted is None:
            self._sorted = [self._instances[name] for name in sorted(self._instances)]
            self._share = np.array([instance.share for instance in self._sorted])
            versions: set[int] = set().union(*(instance.hosted for instance in self._sorted))
            self._hosts = {v: np.array([v in instance.hosted for instance in self._sorted]) for v in versions}
            for index, instance in enumerate(self._sorted):
                instance.index = index
        return self._sorted

    def has(self, instance: Instance) -> bool:
        """Whether this very instance is there, not another of its name."""
        return self._instances.get(instance.name) is instance

    def hosting(self, version: int) -> list[Instance]:
        """Instances that host ``version``, by name."""
        instances = self.instances
        hosts = self._hosts.get(version)
        return [] if hosts is None else [instances[i] for i in np.flatnonzero(hosts)]

    def is_hosted(self, version: int) -> bool:
        """Whether any instance hosts ``version``."""
        return bool(self.instances) and version in self._hosts

    def is_hosted_everywhere(self, version: int) -> bool:
        """Whether every instance hosts ``version``, and there is one."""
        return self.is_hosted(version) and bool(self._hosts[version].all())

    # ------------------------------------------------------------ trajectories

    def with_room(self, version: int, *, barred: Collection[Instance] = ()) -> Array | None:
        """Which instances host ``version`` and may be given more, as a mask by index; None when none does.
        O(instances), vectorised."""
        if not self.is_hosted(version):
            return None
        room: Array = self._hosts[version] & (self._share < self._lookahead)
        for instance in barred:
            room[instance.index] = False
        return room if room.any() else None

    def least_loaded(self, among: Array) -> Instance:
        """The instance of the mask with the smallest load per slot; ties by name."""
        return self.instances[int(np.argmin(np.where(among, self._share, np.inf)))]

    def instance_of(self, trajectory: int) -> Instance | None:
        """Where an unfinished trajectory is placed."""
        return self._where.get(trajectory)

    def place(self, trajectory: int, version: int, instance: Instance | None) -> None:
        """Put a trajectory that is nowhere on an instance, or among the unplaced."""
        if instance is None:
            self.unplaced.setdefault(version, set()).add(trajectory)
            return
        if version not in instance.hosted:
            raise ValueError(f"instance {instance.name!r} hosts {sorted(instance.hosted)}, not version {version}")
        if instance.is_idle_on(version):
            self.touched.add(instance)
        instance.unfinished.setdefault(version, set()).add(trajectory)
        self._where[trajectory] = instance
        self._weigh(instance, +1)

    def remove(self, trajectory: int, version: int) -> None:
        """A trajectory needs no place any more, or not yet. Nothing happens when it had none."""
        instance = self._where.pop(trajectory, None)
        if instance is not None:
            _take(instance.unfinished, version, trajectory)
            self._weigh(instance, -1)
            if instance.is_idle_on(version):
                self.touched.add(instance)
        elif trajectory in self.unplaced.get(version, ()):
            _take(self.unplaced, version, trajectory)

    # ------------------------------------------------------------ inside

    def _instance(self, name: str) -> Instance:
        if name not in self._instances:
            raise ValueError(f"no instance {name!r}; instances: {', '.join(sorted(self._instances)) or 'none'}")
        return self._instances[name]

    def _weigh(self, instance: Instance, change: int) -> None:
        instance.load += change
        if self._sorted is not None:
            self._share[instance.index] = instance.share

    def _displace(self, instance: Instance, versions: Iterable[int]) -> tuple[int, ...]:
        displaced: list[int] = []
        for version in versions:
            instance.hosted.discard(version)
            for trajectory in instance.unfinished.pop(version, ()):
                del self._where[trajectory]
                self.unplaced.setdefault(version, set()).add(trajectory)
                displaced.append(trajectory)
        self._weigh(instance, -len(displaced))
        return tuple(sorted(displaced))


def _take(sets: dict[int, set[int]], version: int, trajectory: int) -> None:
    sets[version].remove(trajectory)
    if not sets[version]:
        del sets[version]
