"""Which version each instance should load or retire now: a function of the present state, not of what was said before.

Rules, per instance, in name order:

1. A version that nobody needs any more (not the newest, nothing in flight, no pin) is retired.
2. A version that an unplaced trajectory or a pin needs and that no instance hosts is *missing*. Missing versions are
   brought back, oldest first, each by one instance: one with room for another version, else one with a version to
   spare, else the least loaded, which gets no new groups until it has a version to spare.
3. Every other instance loads the newest version as soon as it has room for it.
4. An instance without room makes room by retiring one *spare* version: the oldest on which it has nothing unfinished,
   that is not pinned and that no unplaced trajectory waits for. The newest is spare only for rule 2.

A pinned version stays on every instance that hosts it, because the pin's holder may be talking to any of them. So an
instance that hosts one version at a time does not move on while its version is pinned.

Liveness: an unplaced trajectory's version is hosted somewhere, or an instance is on its way to it by rule 2: that
instance gets no new groups, what it has finishes, and then it switches. Once hosted, rule 4 keeps the version there
until the trajectory has been placed and has finished. The one exception is a fleet whose every place is pinned: it
waits for the pins.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from headrace.flow.fleet import Fleet, Instance
from headrace.flow.records import Switch
from headrace.flow.versions import Versions


@dataclass(frozen=True, slots=True)
class _Basis:
    """What all decisions share; when it is unchanged only the touched instances are decided again."""

    versions: int
    members: int
    awaited: frozenset[int]


class Switching:
    """Decides again only what may have changed, so that it can be asked after every event."""

    def __init__(self, fleet: Fleet, versions: Versions) -> None:
        self._fleet = fleet
        self._versions = versions
        self._basis: _Basis | None = None
        self._switches: dict[str, Switch] = {}
        self._barred: set[Instance] = set()

    def switches(self) -> tuple[Switch, ...]:
        """By instance name."""
        self._decide()
        return tuple(switch for _, switch in sorted(self._switches.items()))

    def barred(self) -> Set[Instance]:
        """Instances that must drain to bring a missing version back, and get no new groups."""
        self._decide()
        return self._barred

    def _decide(self) -> None:
        fleet = self._fleet
        basis = _Basis(self._versions.revision, fleet.members, frozenset(fleet.unplaced))
        missing = sorted(
            version
            for version in {*fleet.unplaced, *self._versions.pinned}
            if version != self._versions.newest and not fleet.is_hosted(version)
        )
        # Bringing versions back depends on every load, so that nothing is reused meanwhile.
        if missing or basis != self._basis:
            self._switches.clear()
            self._decide_for(fleet.instances, self._claims(missing))
        else:
            self._decide_for(fleet.touched, {})
        fleet.touched.clear()
        self._basis = None if missing else basis

    def _decide_for(self, instances: Set[Instance] | list[Instance], claims: dict[Instance, int]) -> None:
        for instance in instances:
            switch = self._switch(instance, claims.get(instance))
            if switch is None:
                self._switches.pop(instance.name, None)
            else:
                self._switches[instance.name] = switch

    def _switch(self, instance: Instance, claim: int | None) -> Switch | None:
        load = claim
        if load is None and self._versions.newest not in instance.hosted:
            load = self._versions.newest
        retire = self._dead(instance)
        if load is not None and len(instance.hosted) - len(retire) >= instance.live_versions:
            spare = self._spare(instance, newest=claim is not None)
            if spare is None:
                load = None
            else:
                retire.append(spare)
        if load is None and not retire:
            return None
        return Switch(instance=instance.name, load=load, retire=tuple(retire))

    def _dead(self, instance: Instance) -> list[int]:
        return sorted(version for version in instance.hosted if not self._versions.is_needed(version))

    def _spare(self, instance: Instance, *, newest: bool) -> int | None:
        """The version to give up for another one; ``newest``: even that one."""
        return min(
            (
                version
                for version in instance.hosted
                if self._versions.is_needed(version)
                and instance.is_idle_on(version)
                and version not in self._versions.pinned
                and version not in self._fleet.unplaced
                and (newest or version != self._versions.newest)
            ),
            default=None,
        )

    # ------------------------------------------------------------ missing versions

    def _claims(self, missing: list[int]) -> dict[Instance, int]:
        """Who brings which missing version back; the instances among them that must drain first are barred."""
        claims: dict[Instance, int] = {}
        self._barred = set()
        for version in missing:
            free = [
                (effort, instance.share, instance.name, instance)
                for instance in self._fleet.instances
                if instance not in claims and (effort := self._effort(instance)) is not None
            ]
            if free:
                effort, _, _, instance = min(free, key=lambda candidate: candidate[:3])
                claims[instance] = version
                if effort == 2:
                    self._barred.add(instance)
        return claims

    def _effort(self, instance: Instance) -> int | None:
        """0: has room; 1: can spare an old version; 2: must drain; None: cannot, all is pinned."""
        if len(instance.hosted) - len(self._dead(instance)) < instance.live_versions:
            return 0
        if self._spare(instance, newest=False) is not None:
            return 1
        return 2 if any(version not in self._versions.pinned for version in instance.hosted) else None
