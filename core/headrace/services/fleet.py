"""The rollout instances as the controller sees them: which versions each serves, and how it gets others.

Invariant: an instance is given work of a version only after it reported the version committed with the digest
the trainer published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.contract import EngineHealth, Interruption
from headrace.errors import DeadlineError, EngineError, WireError
from headrace.flow import Flow
from headrace.services.messages import LoadCall, PeerCall, Probe, Published, VersionCall, VersionLoaded
from headrace.services.node_messages import Heartbeat
from headrace.services.request_messages import SwitchCall, Switched
from headrace.services.self_check import Agreement
from headrace.wire import Client

LOAD_DEADLINE = 120.0
HEALTH_DEADLINE = 5.0
REBALANCE_SECONDS = 1.0


@dataclass(slots=True)
class Instance:
    """One rollout node."""

    name: str
    address: str
    slots: int
    live_versions: int
    migrates: bool
    client: Client
    versions: set[int] = field(default_factory=set)
    checked: bool = False
    """Whether it has proved to compute what the trainer computes."""
    draining: bool = False
    """Whether it is to leave."""
    loading: int | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One change of versions at a time."""


class Fleet:
    """All instances. ``changed`` is called whenever an instance gained or lost a version, ``loaded`` when one has
    proved to be right, ``switched`` when answers go on under another one, ``left(name, address)`` when an instance that
    drained has left; ``connect`` makes the client of an address; ``temperature``, ``tolerance``: of
    :class:`Agreement`."""

    def __init__(
        self,
        *,
        emit: Callable[..., Any],
        spawn: Callable[[Coroutine[Any, Any, None], str], Any],
        connect: Callable[[str], Client],
        temperature: float,
        tolerance: float,
    ) -> None:
        self._agreement = Agreement(emit=emit, temperature=temperature, tolerance=tolerance)
        self._emit = emit
        self._connect = connect
        self.spawn = spawn
        self._instances: dict[str, Instance] = {}
        self._flow: Flow | None = None
        self._published: dict[int, Published] = {}
        self._common: int | None = None
        """What :meth:`load_everywhere` was asked for last."""
        self._gained = asyncio.Condition()
        self.evaluating: set[int] = set()
        """Versions whose held-out answers instances are giving."""
        self.changed: Callable[[], None] = lambda: None
        self.loaded: Callable[[VersionLoaded], None] = lambda loaded: None
        self.switched: Callable[[Switched], None] = lambda switched: None
        self.left: Callable[[str, str], None] = lambda name, address: None

    def join(self, name: str, address: str, *, slots: int, live_versions: int, migrates: bool = False) -> None:
        """A node that serves and hosts no policy version yet: it is brought to what the others are at, and gets no work
        of a version before it has proved to serve that one. ``migrates``: its engine hands over, and takes, the state
        of a request."""
        instance = Instance(name, address, slots, live_versions, migrates, self._connect(address))
        self._instances[name] = instance
        if self._flow is not None:
            self._join(self._flow, instance)
            self.sync()
        elif self._common is not None:
            self._begin_switch(instance, self._common, ())

    def drain(self, name: str) -> None:
        """An instance is to leave when all it has is done; it gets nothing new. One that is lost has left already."""
        if (instance := self._instances.get(name)) is None:
            return
        instance.draining = True
        self._emit("instance_draining", instance=name)
        if self._flow is not None:
            self._flow.drain(name)
        self.changed()

    def _let_leave(self) -> None:
        """Drained instances go. While nothing rolls out they have nothing to do but an evaluation."""
        if self._flow is not None:
            drained = self._flow.drained()
        elif self.evaluating:
            drained = ()
        else:
            drained = tuple(sorted(name for name, instance in self._instances.items() if instance.draining))
        for name in drained:
            self._emit("instance_left", instance=name)
            address, _ = self.lost(name)
            self.left(name, address)

    @staticmethod
    def _join(flow: Flow, instance: Instance) -> None:
        flow.join(
            instance.name,
            slots=instance.slots,
            live_versions=instance.live_versions,
            versions=tuple(instance.versions),
            migrates=instance.migrates,
        )

    def lost(self, name: str) -> tuple[str, tuple[int, ...]]:
        """An instance is gone, and gets nothing from this moment on. Returns where it served, and its trajectories,
        which are unplaced now."""
        instance = self._instances.pop(name)
        displaced = self._flow.leave(name) if self._flow is not None else ()
        self.spawn(self._let_go(instance), f"let {name} go")
        return instance.address, displaced

    async def _let_go(self, instance: Instance) -> None:
        """Who waits for its answer, or for it to have a version, waits no more."""
        await instance.client.close()
        async with self._gained:
            self._gained.notify_all()
        await asyncio.gather(*(self._tell_of(instance, other) for other in list(self._instances.values())))

    async def _tell_of(self, lost: Instance, other: Instance) -> None:
        """What was on its way from ``other`` to the lost one goes on there."""
        try:
            await other.client.call(
                "instance_lost",
                PeerCall(address=lost.address),
                deadline=LOAD_DEADLINE,
                awaiting=f"{other.name} to give {lost.name} up",
            )
        except WireError:
            if self.has(other):
                raise

    def has(self, instance: Instance) -> bool:
        """Whether this very instance is there, not a later one of its name."""
        return self._instances.get(instance.name) is instance

    def get(self, name: str) -> Instance:
        """One that is there."""
        return self._instances[name]

    def __len__(self) -> int:
        return len(self._instances)

    def address(self, name: str) -> str:
        """Where an instance serves; "" for no instance."""
        return self._instances[name].address if name else ""

    def hosting(self, version: int) -> list[Instance]:
        """Instances that serve a version, by name; those that drain only where no other does."""
        hosts = [i for _, i in sorted(self._instances.items()) if version in i.versions]
        return [i for i in hosts if not i.draining] or hosts

    @property
    def _staying(self) -> list[Instance]:
        return [instance for instance in self._instances.values() if not instance.draining]

    @property
    def ended(self) -> int | None:
        """Trajectories whose end the present phase has seen; None while nothing rolls out."""
        if self._flow is None:
            return None
        counts = self._flow.counts()
        return counts.dispatched - counts.in_flight

    async def health(self) -> list[EngineHealth]:
        """Of the instances that are to stay; none when one of them does not answer."""
        asked = (
            instance.client.call(
                "health", reply=EngineHealth, deadline=HEALTH_DEADLINE, awaiting=f"how {instance.name} is"
            )
            for instance in self._staying
        )
        try:
            return await asyncio.gather(*asked)
        except WireError:
            return []

    async def close(self) -> None:
        for instance in self._instances.values():
            await instance.client.close()

    # ------------------------------------------------------------ load

    def heard(self, beat: Heartbeat) -> None:
        """How full the memory for keys and values is."""
        name = beat.node.rpartition(".")[0]
        if beat.kv_used is not None and self._flow is not None and name in self._instances:
            self._flow.kv_used(name, beat.kv_used)

    async def rebalance_regularly(self) -> None:
        """Let ``flow`` look for moves again and again; never returns."""
        while True:
            await asyncio.sleep(REBALANCE_SECONDS)
            if self._flow is not None:
                self._flow.rebalance()
                self.changed()

    # ------------------------------------------------------------ versions

    @property
    def probe(self) -> Probe | None:
        """Every version is probed with it."""
        return self._agreement.probe

    def published(self, published: Published) -> None:
        """Remember what a version must be."""
        self._published[published.manifest.version] = published

    def follow(self, flow: Flow | None) -> None:
        """Let ``flow`` decide, from now on, which versions instances load and retire."""
        self._flow = flow
        if flow is not None:
            for _, instance in sorted(self._instances.items()):
                self._join(flow, instance)
                if instance.draining:
                    flow.drain(instance.name)
            self.sync()

    def sync(self) -> None:
        """Carry out what ``flow`` wants now; loads run in the background."""
        self._let_leave()
        if self._flow is None:
            return
        for switch in self._flow.switches():
            instance = self._instances[switch.instance]
            if instance.loading is None:  # else it loads what it was told before this phase
                self._flow.switch_begun(instance.name)
                self._begin_switch(instance, switch.load, switch.retire)

    def _begin_switch(self, instance: Instance, load: int | None, retire: tuple[int, ...]) -> None:
        """What it retires is gone for the flow at once: nothing is placed there that would arrive too late."""
        instance.loading = load if load is not None else -1
        for version in retire:
            instance.versions.discard(version)
            if self._flow is not None:
                self._flow.retired_on(instance.name, version)
        self.spawn(self._switch(instance, load, retire), f"switch {instance.name}")

    async def _switch(self, instance: Instance, load: int | None, retire: tuple[int, ...]) -> None:
        await self._change(instance, load, retire)
        instance.loading = None
        if self._flow is not None and self.has(instance):
            self._flow.switch_ended(instance.name)
        self.sync()
        self.changed()

    async def _change(self, instance: Instance, load: int | None, retire: Collection[int]) -> None:
        """Nothing comes of it, and nothing is wrong, when the instance is lost meanwhile."""
        try:
            async with instance.turn:
                for version in retire:
                    await self._retire(instance, version)
                if load is not None and load not in instance.versions:
                    await self._load(instance, load)
        except (EngineError, WireError):
            if self.has(instance):
                raise

    async def _retire(self, instance: Instance, version: int) -> None:
        instance.versions.discard(version)
        await instance.client.call(
            "retire_version",
            VersionCall(version=version),
            deadline=LOAD_DEADLINE,
            awaiting=f"{instance.name} to retire version {version}",
        )

    async def _load(self, instance: Instance, version: int) -> None:
        probe, interruption = self.probe, self._interruption(instance, version)
        try:
            loaded = await instance.client.call(
                "load_version",
                LoadCall(version=version, probe=probe, interruption=interruption),
                reply=VersionLoaded,
                deadline=LOAD_DEADLINE,
                awaiting=f"{instance.name} to load version {version}",
            )
        except WireError:
            if version < max(self._published):
                return  # overtaken: the version was retired while it travelled
            raise
        if not self.has(instance):
            return
        published, trainer = self._published[version].manifest, self._published[version].logprobs
        if loaded.digest != published.digest:
            raise EngineError(
                f"{instance.name} loaded version {version} with digest {loaded.digest}, "
                f"the trainer published {published.digest}",
                origin=f"node {instance.name}",
                fix="a transport that alters weights cannot be used",
            )
        if probe is None and self.probe is not None:  # the self-check has not seen this instance
            await self._load(instance, version)
            return
        instance.checked = self._agreement.loaded(
            instance.name, version, loaded.logprobs, trainer, checked=instance.checked
        )
        told = {"transfer_seconds": loaded.transfer_seconds, "nbytes": loaded.nbytes}
        self._emit("instance_version", instance=instance.name, version=version, digest=loaded.digest, **told)
        self.loaded(loaded)
        if interruption is not None and not await self._interrupt(instance, version, interruption):
            return
        instance.versions.add(version)
        if self._flow is not None:
            self._flow.committed(instance.name, version)
        async with self._gained:
            self._gained.notify_all()

    def _interruption(self, instance: Instance, version: int) -> Interruption | None:
        """What becomes of the answers that an instance is in the middle of when it has loaded a version."""
        newest = version > max(instance.versions, default=-1)
        return self._flow.interruption if self._flow is not None and newest else None

    async def _interrupt(self, instance: Instance, version: int, interruption: Interruption) -> bool:
        """The version has been verified: from now on the instance generates under it. False when it is lost."""
        switched = await instance.client.call(
            "switch_version",
            SwitchCall(version=version, interruption=interruption),
            reply=Switched,
            deadline=LOAD_DEADLINE,
            awaiting=f"{instance.name} to go on under version {version}",
        )
        if not self.has(instance):
            return False
        if instance.live_versions == 1:
            instance.versions.clear()
        self._emit("instance_switched", instance=instance.name, version=version, **msgspec.structs.asdict(switched))
        self.switched(switched)
        return True

    async def wait_for(self, version: int, *, everywhere: bool) -> None:
        """Returns when an instance, or every one, serves ``version``."""

        def served() -> bool:
            return len(self.hosting(version)) >= (max(1, len(self._staying)) if everywhere else 1)

        try:
            # Not wait_for: the caller must go on in the very moment in which it is true, before the next loss.
            async with asyncio.timeout(LOAD_DEADLINE), self._gained:
                await self._gained.wait_for(served)
        except TimeoutError:
            raise DeadlineError(
                f"no instance served version {version} in {LOAD_DEADLINE:.0f} s",
                fix="read the logs of the rollout nodes",
            ) from None

    async def serves(self, name: str) -> None:
        """Returns when an instance, which may be lost and come back meanwhile, serves a version."""
        async with self._gained:
            await self._gained.wait_for(lambda: name in self._instances and bool(self._instances[name].versions))

    async def load_everywhere(self, version: int) -> None:
        """Load a version on every instance and forget the others: for phases in which nothing rolls out. An instance
        that is lost meanwhile is brought up to date when it is back; one at least has the version at the end."""
        self._common = version
        instances = self._staying
        await asyncio.gather(*(self._change(i, version, i.versions - {version}) for i in instances))
        await self.wait_for(version, everywhere=False)

    async def self_check(self, trainer: Client, version: int) -> bool:
        """Every instance must sample with the log-probs that the trainer computes; but one that is lost meanwhile.
        False when all were."""
        while unchecked := [instance for instance in self.hosting(version) if not instance.checked]:
            instance = unchecked[0]
            try:
                sampled = await self._agreement.sampled(instance.name, instance.client, trainer, version)
            except (EngineError, WireError):
                if self.has(instance):
                    raise
                continue
            instance.checked = True
            if self.probe is None:
                self._agreement.probe = sampled.probe
                published = self._published[version]
                self._published[version] = msgspec.structs.replace(published, logprobs=sampled.trainer)
        return self.probe is not None
