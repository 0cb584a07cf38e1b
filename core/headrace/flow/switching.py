"""Which version each instance should load or retire now: a function of the present state, save that whoever was chosen
to bring a version back stays chosen.

Rules, per instance, in name order:

1. A version that nobody needs any more (not the newest, nothing in flight, no pin) is retired; where the policy
   interrupts, one that the instance does not generate under any more.
2. A version that an unplaced trajectory or a pin needs and that no instance hosts is *missing*. Missing versions are
   brought back, oldest first, each by one instance: one with room for another version, else one with a version to
   spare, else one that is idle on the newest, else the least loaded; the last two get no new groups until then. They
   are chosen anew when that would spare somebody the draining, when the chosen one cannot do it any more, or when the
   versions that are needed, the instances or the missing versions change.
3. Every other instance loads the newest version as soon as it has room for it.
   One that drains loads nothing, neither by this rule nor by rule 2. Where the policy interrupts, an instance that
   hosts one version at a time always has room: what is in the middle of an answer goes on under the newest.
4. An instance without room makes room by retiring one *spare* version: the oldest on which it has nothing unfinished,
   that is not pinned and that no unplaced trajectory waits for. The newest is spare only for rule 2.

A pinned version stays on every instance that hosts it, because the pin's holder may be talking to any of them. So an
instance that hosts one version at a time does not move on while its version is pinned.

Nothing is decided for an instance while the caller carries a switch of it out.

Liveness: an unplaced trajectory's version is hosted somewhere, or an instance is on its way to it by rule 2: that
instance gets no new groups, what it has finishes, and then it switches. Once hosted, rule 4 keeps the version there
until the trajectory has been placed and has finished. The exceptions are a fleet whose every place is pinned,
which waits for the pins, and one of which every instance drains, which waits for another to join.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from headrace.flow.fleet import Fleet
from headrace.flow.instances import Instance
from headrace.flow.records import Switch
from headrace.flow.versions import Versions

_HAS_ROOM, _HAS_SPARE, _IDLES, _MUST_DRAIN = range(4)


class _Basis(NamedTuple):
    """What all decisions share; when it is unchanged only the touched instances are decided again."""

    versions: int
    members: int
    awaited: frozenset[int]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Claim:
    """``version`` comes back on an instance, at an effort as it was when the instance was chosen."""

    version: int
    effort: int


class Switching:
    """Decides again only what may have changed, so that it can be asked after every event."""

    def __init__(self, fleet: Fleet, versions: Versions) -> None:
        self._fleet = fleet
        self._versions = versions
        self._basis: _Basis | None = None
        self._switches: dict[str, Switch] = {}
        self._answer: tuple[Switch, ...] | None = None
        """Those, by instance name, unless one changed since."""
        self._claims: dict[Instance, _Claim] = {}

    def switches(self) -> tuple[Switch, ...]:
        """By instance name; the very same tuple while nothing changes."""
        self.settle()
        if self._answer is None:
            self._answer = tuple(switch for _, switch in sorted(self._switches.items()))
        return self._answer

    def settle(self) -> None:
        """Decide, so that the fleet bars whoever must drain to bring a missing version back."""
        fleet = self._fleet
        basis = self._basis_now()
        if basis != self._basis or (self._claims and any(map(self._is_reason_to_choose_anew, fleet.touched))):
            self._claims = self._claims_of(basis.missing)
            fleet.bar({instance for instance, claim in self._claims.items() if claim.effort >= _IDLES})
            self._switches.clear()
            self._answer = None
            self._decide_for(fleet.instances)
        else:
            self._decide_for(fleet.touched)
        fleet.touched.clear()
        self._basis = basis

    def _basis_now(self) -> _Basis:
        fleet, awaited = self._fleet, frozenset[int]()
        missing: tuple[int, ...] = ()
        if fleet.unplaced or self._versions.pinned:  # which is rare, and this is asked after every event
            awaited = frozenset(fleet.awaited)
            needed = sorted(awaited.union(self._versions.pinned) - {self._versions.newest})
            missing = tuple(version for version in needed if not fleet.is_hosted(version))
        return _Basis(self._versions.revision, fleet.members, awaited, missing)

    def _decide_for(self, instances: Iterable[Instance]) -> None:
        for instance in instances:
            switch = None if instance.switching else self._switch(instance)
            if switch == self._switches.get(instance.name):
                continue
            self._answer = None
            if switch is None:
                del self._switches[instance.name]
            else:
                self._switches[instance.name] = switch

    def _switch(self, instance: Instance) -> Switch | None:
        claim = self._claims.get(instance)
        load = None if claim is None else claim.version
        if load is None and self._versions.newest not in instance.hosted and instance not in self._fleet.draining:
            load = self._versions.newest
        retire = self._dead(instance)
        full = len(instance.hosted) - len(retire) >= instance.live_versions
        if load is not None and full and not (claim is None and self._is_interrupted(instance)):
            spare = self._spare(instance, newest=claim is not None)
            if spare is None:
                load = None
            else:
                retire.append(spare)
        if load is None and not retire:
            return None
        return Switch(instance=instance.name, load=load, retire=tuple(retire))

    def _dead(self, instance: Instance) -> list[int]:
        return sorted(
            version
            for version in instance.hosted
            if not self._versions.is_needed(version) and instance.is_idle_on(version)
        )

    def _is_interrupted(self, instance: Instance) -> bool:
        """Whether its one version gives way to the newest, whatever is unfinished."""
        return (
            self._fleet.interrupts
            and instance.live_versions == 1
            and not any(version in self._versions.pinned for version in instance.hosted)
        )

    def _spare(self, instance: Instance, *, newest: bool) -> int | None:
        """The version to give up for another one; ``newest``: even that one."""
        return min(
            (
                version
                for version in instance.hosted
                if self._versions.is_needed(version)
                and instance.is_idle_on(version)
                and version not in self._versions.pinned
                and version not in self._fleet.awaited
                and (newest or version != self._versions.newest)
            ),
            default=None,
        )

    # ------------------------------------------------------------ missing versions

    def _claims_of(self, missing: Iterable[int]) -> dict[Instance, _Claim]:
        """Who brings which missing version back."""
        claims: dict[Instance, _Claim] = {}
        for version in missing:
            free = [
                (effort, *instance.order, instance)
                for instance in self._fleet.instances
                if instance not in claims and (effort := self._effort(instance)) is not None
            ]
            if free:
                effort, *_, instance = min(free)
                claims[instance] = _Claim(version, effort)
        return claims

    def _is_reason_to_choose_anew(self, instance: Instance) -> bool:
        effort, claim = self._effort(instance), self._claims.get(instance)
        if claim is None:
            drained = any(claim.effort == _MUST_DRAIN for claim in self._claims.values())
            return drained and effort is not None and effort < _MUST_DRAIN
        return claim.effort < _IDLES and (effort is None or effort >= _IDLES)

    def _effort(self, instance: Instance) -> int | None:
        """What it takes to load a missing version; None where it cannot be: all is pinned, or the instance drains."""
        if instance in self._fleet.draining:
            return None
        if len(instance.hosted) - len(self._dead(instance)) < instance.live_versions:
            return _HAS_ROOM
        if self._spare(instance, newest=False) is not None:
            return _HAS_SPARE
        if self._spare(instance, newest=True) is not None:
            return _IDLES
        return _MUST_DRAIN if any(version not in self._versions.pinned for version in instance.hosted) else None
