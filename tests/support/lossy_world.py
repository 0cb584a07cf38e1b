"""A controller, its fleet and its recovery among workers, instances and a storage unit that may be lost at any moment.

What a process says is on its way until it is delivered, also when the process is gone by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from headrace.contract import StalenessPolicy
from headrace.dataplane import LedgerService, Note
from headrace.dataplane.messages import Join, Notes
from headrace.errors import HeadraceError, RunError
from headrace.flow import Flow
from headrace.observe.event_log import EventLog
from headrace.run.columns import phase_partition
from headrace.run.recovery import Recovery
from headrace.run.scaling import Scaling
from headrace.services.controller import Controller, Part
from headrace.services.fleet import Fleet
from headrace.services.messages import PeerCall, PlaceCall, Report, WorkRequest
from headrace.services.node_messages import node_id
from headrace.services.workers import Workers
from support.desk import COLUMNS, PARTITION, failed, finished, plan, published, stored, turns
from support.lossy_launches import Launches
from support.lossy_peers import InstancePeer, Play, Putting, Unit, Worker

STORAGE = "storage-0"


class World(Launches):
    """Satisfies :class:`headrace.run.recovery.Nodes`; is its supervisor, trainer and processes."""

    def __init__(
        self,
        directory: Path,
        *,
        policy: StalenessPolicy,
        sizes: tuple[int, int],
        live_versions: list[int],
        workers: int,
        max_attempts: int,
    ) -> None:
        self.log = EventLog(directory / "events.jsonl")
        self.emit = self.log.emit
        self.up: dict[str, int] = {}
        """Node → its present process."""
        self.starting: dict[str, asyncio.Future[str]] = {}
        self.peers: dict[str, Any] = {}
        self.rows: set[int] = set()
        self.units: dict[str, str] = {}
        self.plane: Any = self
        self._numbers: dict[str, int] = {}
        """Storage unit's process → its number."""
        self._putting: list[Putting] = []
        self.live = {0}
        self.batches = 0
        self._starts: dict[str, int] = {}
        self._live_versions = {f"rollout-{n}": live for n, live in enumerate(live_versions)}
        self._workers = [f"environment-{n}" for n in range(workers)]
        self._tasks: set[asyncio.Task[Any]] = set()
        self._batch: asyncio.Task[Part] | None = None
        self._read = False
        self._leave: asyncio.Task[None] | None = None
        self.fleet = Fleet(
            emit=self.emit, spawn=self.spawn, connect=self.peers.__getitem__, temperature=1.0, tolerance=1.0
        )
        self.ledger = LedgerService(connect=lambda address: Unit(self.rows))  # type: ignore[arg-type,return-value]  # calls only
        self.controller = Controller(emit=self.emit, fleet=self.fleet, ledger=self.ledger, max_attempts=max_attempts)
        self.workers = Workers(self.peers.__getitem__)
        self.trainer: Any = self
        self.stages: Any = self
        self.supervisor: Any = self
        batch_groups, group_size = sizes
        self.flow = Flow(policy=policy, batch_groups=batch_groups, group_size=group_size, columns=COLUMNS)
        self._policy = policy
        self.dismissed: set[str] = set()
        self.scaling = Scaling(self, list(self._live_versions), launch=self._launch)
        self.fleet.left = self.scaling.left
        self._recovery = Recovery(self)

    async def begin(self) -> None:
        """Every node serves version 0, and the phase begins."""
        self.emit("run_started", job="lossy", seed=0, instances=list(self._live_versions), phases=[])
        self.units[STORAGE] = self._serve(STORAGE)
        self.emit("version_published", version=0, digest="d0", nbytes=1)
        self.fleet.published(published(0))
        for name in self._live_versions:
            self.join(name, self._serve(name))
        loading = asyncio.ensure_future(self.fleet.load_everywhere(0))
        await turns()
        for name in self._live_versions:
            self._peer(name).load(live=self.live)
        await loading
        for name in self._live_versions:
            self.emit("self_check", instance=name, version=0, mean_abs_logprob_diff=0.0, tolerance=1.0)
        for name in self._workers:
            self.workers.add(name, self._serve(name))
        self.emit(
            "phase_started",
            phase="rl",
            algorithm="grpo",
            policy="any",
            max_staleness=self._policy.max_staleness,
            interrupts=self._policy.interruption is not None,
            **{"batch_groups": self.flow.batch_groups, "group_size": self.flow.group_size},
            **{"greedy": False, "rollout": True, "version": 0, "steps": 100, "until": None, "stages": []},
        )
        self.fleet.follow(self.flow)
        self.controller.open_rows(self.flow, phase_partition(PARTITION, COLUMNS, group_size=self.flow.group_size))
        self.controller.begin_phase(self.flow, plan())

    # ------------------------------------------------------------ what recovery works on

    def join(self, name: str, address: str) -> None:
        self.fleet.join(name, address, slots=3, live_versions=self._live_versions[name], migrates=True)

    def fail(self, error: BaseException) -> None:
        raise AssertionError("the run fails") from error

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        self._tasks.add(task := asyncio.ensure_future(work))
        return task

    async def lost(self, address: str) -> None:
        """What the data plane's client of the controller is told; nothing of it is under way here."""

    async def tell(self, method: str, peer: PeerCall, *, awaiting: str) -> None:
        """What separate stages are told; there are none here."""

    async def restart(self, name: str) -> str:
        self.starting[name] = asyncio.get_running_loop().create_future()
        return await self.starting[name]

    async def call(self, method: str, request: Any, **_: Any) -> None:
        assert method == "unit_lost"

    # ------------------------------------------------------------ processes

    def _serve(self, name: str) -> str:
        start = self._starts[name] = self._starts.get(name, -1) + 1
        address = node_id(name, start)
        role = name.rpartition("-")[0]
        self.emit("node_started", node=name, role=role, pid=start)
        if role == "rollout":
            self.peers[address] = InstancePeer(address, live_versions=self._live_versions[name])
        elif role == "environment":
            self.peers[address] = Worker(address)
        else:
            self._numbers[address] = self.ledger.join(Join(address, address))
        self.up[name] = start
        return address

    def _peer(self, name: str) -> Any:
        return self.peers[node_id(name, self.up[name])]

    def lose(self, name: str) -> None:
        """A process is gone."""
        process = node_id(name, self.up.pop(name))
        if name == STORAGE:
            self.rows.clear()
        elif name in self._workers:
            self.peers[process].alive = False
        if name in self.dismissed:
            self.emit("node_stopped", node=name, reason="ended")
            return
        self.emit("node_stopped", node=name, reason="was killed by signal 9")
        self._recovery.lost(name, name.rpartition("-")[0], process, RunError("gone"))
        if name in self._workers:
            self._ask(self.peers[process])  # it was on its way

    def _comes_back(self, name: str) -> None:
        self.starting.pop(name).set_result(self._serve(name))

    # ------------------------------------------------------------ what may happen next

    async def step(self, random: Random, *, failures: bool) -> None:
        """One thing, or nothing when there is nothing."""
        possible = list(self._possible(failures=failures))
        if possible:
            result = random.choice(possible)()
            if asyncio.iscoroutine(result):
                await result
        await turns()
        self.check()

    def check(self) -> None:
        """Nothing went wrong in the background."""
        if self.controller.failed.done():
            self.controller.failed.result()
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()
        counts = self.flow.counts()
        dropped = sum(counts.dropped.values())
        assert counts.dispatched == counts.trained + counts.buffered + counts.in_flight + dropped

    def _possible(self, *, failures: bool) -> Iterator[Callable[[], Any]]:
        for name in self.starting:
            yield lambda name=name: self._comes_back(name)
        for name in self._live_versions:
            if name in self.up and (peer := self._peer(name)).waits("load_version"):
                yield lambda peer=peer: peer.load(live=self.live)
        for peer in list(self.peers.values()):
            if isinstance(peer, InstancePeer):
                for sending in peer.sendings:
                    if sending.outcome is None:
                        yield lambda peer=peer, sending=sending: peer.send(sending, self.peers)
                    else:
                        yield lambda peer=peer, sending=sending: peer.reply(sending)
                for place in range(len(peer.switchings)):
                    yield lambda peer=peer, place=place: peer.go_on(place, self.peers)
            if isinstance(peer, Worker):
                if peer.mail:
                    yield lambda peer=peer: self._deliver(peer)
                if peer.alive:
                    yield from self._working(peer, failures=failures)
        for putting in self._putting:
            yield lambda putting=putting: self._arrive(putting)
        yield from self._training()

    # ------------------------------------------------------------ workers

    def _working(self, worker: Worker, *, failures: bool) -> Iterator[Callable[[], Any]]:
        if worker.is_told:
            yield worker.hear
        if worker.asking is None:
            yield lambda: self._ask(worker)
        elif worker.asking.done():
            yield lambda: self._receive(worker)
        for play in worker.plays:
            for trajectory in play.places:
                if trajectory not in play.done and self._can_go_on(worker, play, trajectory):
                    yield lambda play=play, trajectory=trajectory: self._go_on(worker, play, trajectory)
            if len(play.done) == len(play.places) and self._can_store(worker):
                yield lambda play=play: self._store(worker, play)
            if failures:
                yield lambda play=play: self._give_up(worker, play)

    def _ask(self, worker: Worker) -> None:
        worker.asking = asyncio.ensure_future(self.controller.next_work(WorkRequest(worker=worker.address)))

    def _receive(self, worker: Worker) -> None:
        asking, worker.asking = worker.asking, None
        assert asking is not None
        item = asking.result()
        if item is not None:
            worker.plays.append(Play(item, {m.trajectory: (m.instance, m.attempt) for m in item.members}))

    def _can_go_on(self, worker: Worker, play: Play, trajectory: int) -> bool:
        """Unless it waits for the controller, or for an instance that is gone without the worker knowing."""
        place = play.places[trajectory]
        if isinstance(place, asyncio.Task):
            return place.done()
        name, _, start = place[0].rpartition(".")
        return not place[0] or place[0] in worker.lost or self.up.get(name) == int(start)

    def _go_on(self, worker: Worker, play: Play, trajectory: int) -> None:
        place, item = play.places[trajectory], play.item
        if isinstance(place, asyncio.Task):
            try:
                play.places[trajectory] = (place.result().instance, place.result().attempt)
            except HeadraceError:
                self._give_up(worker, play)
        elif not place[0] or place[0] in worker.lost:
            call = PlaceCall(
                worker=worker.address,
                version=item.version,
                group=item.group,
                trajectory=trajectory,
                instance=place[0],
                attempt=place[1],
                evaluation=False,
            )
            play.sampled.pop(trajectory, None)
            play.places[trajectory] = placing = asyncio.ensure_future(self.controller.place(call))
            placing.add_done_callback(lambda done: done.cancelled() or done.exception())  # its worker may be lost
        elif onward := self.peers[place[0]].sent_on.get((trajectory, place[1])):
            play.places[trajectory] = onward, place[1]
        elif self._policy.interruption is not None and self.flow.knows(item.group):
            worker.sample(play, trajectory, self.peers[place[0]])
        elif item.version in self.peers[place[0]].serves or (trajectory, place[1]) in self.peers[place[0]].guests:
            play.done.add(trajectory)
            worker.mail.append(finished(item, trajectory))
        else:
            assert not self.flow.knows(item.group), f"{place[0]} is asked for version {item.version}"
            self._give_up(worker, play)

    def _can_store(self, worker: Worker) -> bool:
        """The controller has heard of all that made the rows, and there is a unit that the worker knows to be there."""
        if worker.mail or STORAGE not in self.up:
            return False
        return worker.unit in ("", node_id(STORAGE, self.up[STORAGE]))

    def _store(self, worker: Worker, play: Play) -> None:
        worker.plays.remove(play)
        worker.unit = node_id(STORAGE, self.up[STORAGE])
        self._putting.append(Putting(worker.unit, worker, play))

    def _arrive(self, putting: Putting) -> None:
        """The unit tells the ledger of the rows, and keeps those that it takes."""
        self._putting.remove(putting)
        oldest = [putting.play.oldest(member.trajectory) for member in putting.play.item.members]
        note: Note = msgspec.structs.replace(stored(putting.play.item, oldest=oldest), producer=putting.worker.address)
        try:
            (noted,) = self.ledger.note(Notes(self._numbers[putting.unit], [note]))
        except RunError:  # the unit is gone: the worker puts them into another
            putting.worker.plays.append(putting.play)
            return
        assert noted.failed is None
        assert note.rows is not None
        refused = [0] * len(note.rows) if noted.refused is None else noted.refused.tolist()
        self.rows.update(row for row, code in zip(note.rows.tolist(), refused, strict=True) if not code)

    def _give_up(self, worker: Worker, play: Play) -> None:
        worker.plays.remove(play)
        worker.mail.append(failed(play.item))

    async def _deliver(self, worker: Worker) -> None:
        mail, worker.mail = worker.mail, []
        await self.controller.report(Report(worker=worker.address, entries=mail))

    # ------------------------------------------------------------ trainer

    @property
    def is_training(self) -> bool:
        """Whether a batch was read, or its version waits to be published."""
        return self._read or self._leave is not None

    def _training(self) -> Iterator[Callable[[], Any]]:
        if self._leave is not None:
            if self._leave.done():
                yield self._publish
        elif self._batch is None:
            yield self._take
        elif self._batch.done():
            if self._read:
                yield self._train
            elif STORAGE in self.up:
                yield self._read_rows

    def _take(self) -> None:
        self._batch = asyncio.ensure_future(self.controller.take_batch())

    def _read_rows(self) -> None:
        assert self._batch is not None
        part = self._batch.result()
        lease = part.lease
        if self.rows.issuperset(lease.rows):
            self._read = True
        else:
            self._batch = None
            self.controller.batch_lost(part, lease.groups)

    def _train(self) -> None:
        assert self._batch is not None
        lease, self._batch, self._read = self._batch.result().lease, None, False
        self.controller.trained(lease, applied=True)
        self.emit(
            "batch_trained",
            version=lease.version,
            groups=lease.groups,
            rows=lease.rows,
            rewards=[1.0] * len(lease.rows),
            applied=True,
            optimizer_steps=1,
            started=0.0,
            finished=1.0,
            wait_seconds=0.0,
        )
        self.batches += 1
        self._leave = asyncio.ensure_future(self.controller.publishable())

    def _publish(self) -> None:
        assert self._leave is not None
        self._leave.result()
        self._leave, version = None, self.flow.view().version + 1
        self.fleet.published(published(version))
        self.live.add(version)
        self.emit("version_published", version=version, digest=f"d{version}", nbytes=1)
        self.flow.published(version)
        self.controller.pump()
        for old in self.flow.retirable():
            self.flow.retired(old)
            self.live.discard(old)
            self.emit("version_retired", version=old)
