"""The rollout instances: which versions each hosts, and which unfinished trajectories are placed where.

A trajectory is *unfinished* until its tokens are done. Invariant: a placed trajectory is on an instance that hosts its
version; when that stops being true (the instance left, or lost the version) the trajectory is *unplaced*, kept under
its version, and named to the caller. An instance that *drains* finishes what is placed on it; a trajectory that has
begun elsewhere is placed there only where nobody else can take it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Set

from headrace.flow.bound import Bound
from headrace.flow.instances import Instance, Lightest, take_out

_NOWHERE: tuple[None, None] = (None, None)


class Fleet:
    """``lookahead``: an instance is given new work while its load is below ``slots * lookahead``."""

    interrupts = False
    """Whether what is unfinished goes on under newer versions (:class:`headrace.flow.interrupted.InterruptedFleet`)."""

    def __init__(self, *, lookahead: float) -> None:
        if lookahead <= 0:
            raise ValueError(f"lookahead is a factor above 0, got {lookahead}")
        self.members = 0
        """Changes when an instance joins, drains or leaves."""
        self.touched: set[Instance] = set()
        """Instances that host other versions, or became idle or busy on one, since whoever reads this cleared it."""
        self.pressed: set[Instance] = set()
        """Instances short of KV memory: they are full, however many slots are idle."""
        self.draining: set[Instance] = set()
        """Instances that are to leave when nothing is left to do for them."""
        self.dealt: Set[Instance] = frozenset()
        """Instances that groups yet to start will be dealt to, draining or not."""
        self.unplaced: dict[int, set[int]] = {}
        """Version → unfinished trajectories that are on no instance; no empty sets."""
        self.bound = Bound()
        self.seats = 0
        """Versions that all instances together can host at once, those that drain left out."""
        self._lookahead = lookahead
        self._joins = 0
        self._instances: dict[str, Instance] = {}
        self._where: dict[int, tuple[int, Instance]] = {}
        """Trajectory → the version it is generated under, and where."""
        self._load: Counter[int] = Counter()
        """Version → trajectories placed on, or bound for, any instance; who moves counts twice."""
        self._busy: dict[int, set[Instance]] = {}
        """Version → instances with such trajectories; no empty sets."""
        self._hosts: dict[int, set[Instance]] = {}
        """Version → who hosts it; no empty sets."""
        self._open: dict[int, Lightest] = {}
        """The same without the barred."""
        self._barred: Set[Instance] = frozenset()
        """Those that drain among them."""
        self._by_name: dict[int | None, list[Instance]] = {}
        """Version → its hosts, None → all instances; made when asked for."""

    # ------------------------------------------------------------ instances

    def join(
        self, name: str, *, slots: int, live_versions: int, versions: Collection[int], migrates: bool = False
    ) -> None:
        """A new instance that already hosts ``versions``."""
        if name in self._instances:
            raise ValueError(f"instance {name!r} is known already; it must leave before it joins again")
        if slots < 1 or live_versions < 1 or len(set(versions)) > live_versions:
            raise ValueError(
                f"instance {name!r}: {slots} slots and {live_versions} live versions are both at least 1 "
                f"and cannot host {sorted(versions)}"
            )
        self._joins += 1
        instance = Instance(
            name=name,
            slots=slots,
            limit=slots * self._lookahead,
            live_versions=live_versions,
            hosted=set(),
            serial=self._joins,
            migrates=migrates,
        )
        self._instances[name] = instance
        for version in versions:
            self._host(instance, version)
        self._by_name.pop(None, None)
        self.seats += live_versions
        self.members += 1

    def leave(self, name: str) -> tuple[int, ...]:
        """An instance is gone; returns its unfinished trajectories, now unplaced, ascending."""
        instance = self._instance(name)
        displaced = self._displace(instance, list(instance.hosted))
        del self._instances[name]
        self.touched.discard(instance)
        self.pressed.discard(instance)
        if instance in self.draining:
            self.draining.remove(instance)
        else:
            self.seats -= instance.live_versions
        self._barred -= {instance}
        self._by_name.pop(None, None)
        self.members += 1
        return displaced

    def drain(self, name: str) -> None:
        """An instance is to leave. What is on its way there still comes, and counts as unfinished there: who carries it
        would else tell of an arrival that nobody knows of. Twice is fine."""
        instance = self._instance(name)
        if instance in self.draining:
            return
        self.draining.add(instance)
        self.seats -= instance.live_versions
        self.bar(self._barred)
        self.members += 1

    def drained(self, pinned: Collection[int]) -> list[str]:
        """Draining instances, by name, that nobody needs: nothing is unfinished or will be dealt there, and no version
        they host is pinned, or waited for by an unplaced trajectory."""
        return sorted(
            instance.name
            for instance in self.draining
            if not instance.unfinished
            and instance not in self.dealt
            and not any(version in pinned or version in self.awaited for version in instance.hosted)
        )

    @property
    def awaited(self) -> Collection[int]:
        """Versions that unplaced trajectories wait for."""
        return self.unplaced.keys()

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
        self._host(instance, version)
        self._take_up(instance, version)
        displaced = [trajectory for old in replaced for trajectory in self.retire(name, old)]
        self.touched.add(instance)
        return tuple(displaced)

    def switch(self, name: str, switching: bool) -> None:
        """The caller begins to carry a switch of an instance out, or is done with it."""
        instance = self._instance(name)
        instance.switching = switching
        self.touched.add(instance)

    def retire(self, name: str, version: int) -> tuple[int, ...]:
        """An instance no longer serves ``version``; returns what was unfinished under it there, now unplaced."""
        instance = self._instance(name)
        if version not in instance.hosted:
            return ()
        displaced = self._displace(instance, [version])
        self.touched.add(instance)
        return displaced

    @property
    def instances(self) -> list[Instance]:
        """By name."""
        return self._sorted(None, self._instances.values())

    @property
    def staying(self) -> int:
        """How many instances do not drain."""
        return len(self._instances) - len(self.draining)

    def has(self, instance: Instance) -> bool:
        """Whether this very instance is there, not another of its name."""
        return self._instances.get(instance.name) is instance

    def hosting(self, version: int) -> list[Instance]:
        """Instances that host ``version``, by name."""
        return self._sorted(version, self._hosts.get(version, ()))

    def is_busy(self, version: int) -> bool:
        """Whether something unfinished is placed under ``version``."""
        return version in self._busy

    def is_hosted(self, version: int) -> bool:
        """Whether any instance hosts ``version``."""
        return version in self._hosts

    def is_hosted_everywhere(self, version: int) -> bool:
        """Whether every instance that does not drain hosts ``version``, and there is one."""
        hosts = self._hosts.get(version, set())
        return self.staying == len(hosts) - len(hosts & self.draining) > 0

    def busy(self, version: int) -> list[Instance]:
        """Instances with unfinished trajectories of ``version``, without those that drain; in no order."""
        return [instance for instance in self._busy.get(version, ()) if instance not in self.draining]

    def demand(self) -> Counter[int]:
        """Version → unfinished trajectories, without those on instances that drain. O(versions + those instances)."""
        demand = self._load + Counter({version: len(waiting) for version, waiting in self.unplaced.items()})
        for instance in self.draining:
            for version, placed in instance.unfinished.items():
                demand[version] -= len(placed)
        return demand

    def bar(self, instances: Set[Instance]) -> None:
        """These get no new groups, until this is said again without them; nor do those that drain."""
        barred = frozenset(instances | self.draining)
        for instance in barred ^ self._barred:
            for version in instance.hosted:
                if instance in barred:
                    self._open[version].leave(instance)
                else:
                    self._open[version].enter(instance)
        self._barred = barred

    def press(self, name: str, pressure: float) -> bool:
        """An instance has so much of its KV memory in use, which is too much; 0: it is not too much. Returns whether it
        is under pressure now and was not before."""
        instance = self._instance(name)
        began = bool(pressure and not instance.pressure)
        instance.pressure = pressure
        (self.pressed.add if pressure else self.pressed.discard)(instance)
        self._weigh(instance, 0)
        return began

    # ------------------------------------------------------------ trajectories

    def room(self, version: int) -> Instance | None:
        """Where a trajectory of a new group goes: the least loaded, per slot, of the instances that host ``version``,
        are not barred and may be given more; ties by name. None when there is none."""
        hosts = self._open.get(version)
        lightest = hosts.first() if hosts is not None else None
        return lightest if lightest is not None and lightest.has_room else None

    def room_again(self, version: int) -> Instance | None:
        """The same for a trajectory that has begun: where nobody else has room, a barred instance takes it, one that
        drains last."""
        found = self.room(version)
        if found is None:
            barred = (i for i in self._barred if version in i.hosted and i.has_room)
            found = min(barred, key=lambda instance: (instance in self.draining, instance.order), default=None)
        return found

    def instance_of(self, trajectory: int) -> Instance | None:
        """Where an unfinished trajectory is placed."""
        return self._where.get(trajectory, _NOWHERE)[1]

    def version_of(self, trajectory: int) -> int | None:
        """The version that an unfinished trajectory is placed under."""
        return self._where.get(trajectory, _NOWHERE)[0]

    def place(self, trajectory: int, version: int, instance: Instance | None) -> None:
        """Put a trajectory that is nowhere on an instance, or among the unplaced."""
        if instance is None:
            self.unplaced.setdefault(version, set()).add(trajectory)
            return
        if version not in instance.hosted:
            raise ValueError(f"instance {instance.name!r} hosts {sorted(instance.hosted)}, not version {version}")
        self._add(instance, version, trajectory)
        self._where[trajectory] = version, instance

    def remove(self, trajectory: int) -> None:
        """A trajectory needs no place any more, or not yet. Nothing happens when it had none."""
        self.release(trajectory)
        placed = self._where.pop(trajectory, None)
        if placed is not None:
            self._discard(placed[1], placed[0], trajectory)
        elif self.unplaced:
            for version in [v for v, waiting in self.unplaced.items() if trajectory in waiting]:
                take_out(self.unplaced, version, trajectory)

    # ------------------------------------------------------------ moves

    def staying_on(self, instance: Instance, version: int) -> list[int]:
        """Trajectories of a version that are placed on an instance and not bound for another one; ascending."""
        return sorted(t for t in instance.unfinished.get(version, ()) if t not in self.bound)

    def bind(self, trajectory: int, version: int, target: Instance) -> None:
        """A trajectory that is placed and not bound will go on on ``target``."""
        self._add(target, version, trajectory)
        self.bound.add(trajectory, version, self._where[trajectory][1], target)

    def arrive(self, trajectory: int) -> bool:
        """A trajectory is where it was bound for; False when it was bound for nowhere any more."""
        if trajectory not in self.bound:
            return False
        version, target = self.bound.take(trajectory)
        self._discard(self._where[trajectory][1], version, trajectory)
        self._where[trajectory] = version, target
        return True

    def release(self, trajectory: int) -> None:
        """A trajectory is bound for nowhere any more, if it was."""
        if trajectory in self.bound:
            version, target = self.bound.take(trajectory)
            self._discard(target, version, trajectory)

    # ------------------------------------------------------------ inside

    def _instance(self, name: str) -> Instance:
        if name not in self._instances:
            raise ValueError(f"no instance {name!r}; instances: {', '.join(sorted(self._instances)) or 'none'}")
        return self._instances[name]

    def _sorted(self, key: int | None, instances: Iterable[Instance]) -> list[Instance]:
        if key not in self._by_name:
            self._by_name[key] = sorted(instances, key=lambda instance: instance.name)
        return self._by_name[key]

    def _host(self, instance: Instance, version: int) -> None:
        instance.hosted.add(version)
        if version not in self._hosts:
            self._hosts[version], self._open[version] = set(), Lightest()
        self._hosts[version].add(instance)
        if instance not in self._barred:
            self._open[version].enter(instance)
        self._by_name.pop(version, None)

    def _unhost(self, instance: Instance, version: int) -> None:
        instance.hosted.remove(version)
        self._hosts[version].remove(instance)
        self._open[version].leave(instance)
        if not self._hosts[version]:
            del self._hosts[version], self._open[version]
        self._by_name.pop(version, None)

    def _take_up(self, instance: Instance, version: int) -> None:
        """An instance has just committed a version."""

    def _add(self, instance: Instance, version: int, trajectory: int) -> None:
        if instance.is_idle_on(version):
            self.touched.add(instance)
            self._busy.setdefault(version, set()).add(instance)
        instance.unfinished.setdefault(version, set()).add(trajectory)
        self._load[version] += 1
        self._weigh(instance, +1)

    def _discard(self, instance: Instance, version: int, trajectory: int) -> None:
        take_out(instance.unfinished, version, trajectory)
        self._load[version] -= 1
        self._weigh(instance, -1)
        if instance.is_idle_on(version):
            self.touched.add(instance)
            take_out(self._busy, version, instance)
            if version not in self._busy:
                del self._load[version]

    def _weigh(self, instance: Instance, change: int) -> None:
        instance.weigh(change)
        if change <= 0 and instance not in self._barred:
            for version in instance.hosted:
                self._open[version].enter(instance)

    def _displace(self, instance: Instance, versions: Iterable[int]) -> tuple[int, ...]:
        displaced: list[int] = []
        for version in versions:
            for trajectory in list(instance.unfinished.get(version, ())):
                self.release(trajectory)  # what was bound for here stays where it is
                if self._where[trajectory][1] is instance:
                    self.remove(trajectory)
                    self.place(trajectory, version, None)
                    displaced.append(trajectory)
            self._unhost(instance, version)
        return tuple(sorted(displaced))
