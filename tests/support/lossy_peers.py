"""The processes of a lossy world: they do what the world lets them, when it does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import EngineError, HeadraceError, WireError
from headrace.services.messages import Placement, TrajectoryFinished, VersionCall, WorkItem
from headrace.services.request_messages import MoveCall, Moved, SwitchCall, Switched
from support.desk import Peer, finished, loaded, switched


@dataclass(eq=False)
class Play:
    """A group at a worker. ``places``: trajectory → (address, attempt), or the controller's answer to come."""

    item: WorkItem
    places: dict[int, tuple[str, int] | asyncio.Task[Placement]]
    done: set[int] = field(default_factory=set)
    sampled: dict[int, list[int]] = field(default_factory=dict)
    """Trajectory → the version of each token of its present try, where tries are interrupted."""

    def oldest(self, trajectory: int) -> int:
        """The version of its oldest token."""
        return min(self.sampled.get(trajectory, [self.item.version]))

    def finished(self, trajectory: int) -> TrajectoryFinished:
        """What its worker says of an answer."""
        tokens = self.sampled.get(trajectory)
        return finished(self.item, trajectory, *([tokens] if tokens else []))


@dataclass(eq=False)
class Sending:
    """A move that an instance was asked for. ``outcome``: what it will answer, once it has sent the trajectory."""

    call: MoveCall
    answer: asyncio.Future[Moved]
    outcome: Moved | HeadraceError | None = None


class InstancePeer(Peer):
    """An instance: loads and moves when the world says so, retires at once."""

    def __init__(self, address: str, *, live_versions: int) -> None:
        super().__init__(address)
        self.serves: set[int] = set()
        self.guests: set[tuple[int, int]] = set()
        """Trajectories that came from elsewhere, with their tries: their version stays until they are done."""
        self.sendings: list[Sending] = []
        self.sent_on: dict[tuple[int, int], str] = {}
        """Trajectories with their tries → where they went."""
        self._live_versions = live_versions
        self.under = -1
        """What it samples under at least."""
        self.switchings: list[tuple[SwitchCall, asyncio.Future[Switched], list[tuple[int, int, int]] | None]] = []
        """Calls to switch, and once it has switched who was interrupted."""

    async def call(self, method: str, request: Any = None, **told: Any) -> Any:
        if method == "retire_version" and not self.closed:
            assert isinstance(request, VersionCall)
            self.serves.discard(request.version)
            return None
        if method == "instance_lost" and not self.closed:
            return None
        if method == "switch_version" and not self.closed:
            answer: asyncio.Future[Switched] = asyncio.get_running_loop().create_future()
            self.switchings.append((request, answer, None))
            return await answer
        if method == "move" and not self.closed:
            self.sendings.append(Sending(request, asyncio.get_running_loop().create_future()))
            return await self.sendings[-1].answer
        return await super().call(method, request, **told)

    def send(self, sending: Sending, peers: Mapping[str, Any]) -> None:
        """A trajectory goes on at the target, if that is there and has its version; its worker and the controller hear
        later."""
        call, sending.outcome = sending.call, Moved()
        target = peers[call.target]
        if target.closed or call.version not in target.serves:
            sending.outcome = EngineError(f"version {call.version} is not served")
            return
        this = call.trajectory, call.attempt
        self.guests.discard(this)
        self.sent_on[this] = call.target
        target.sent_on.pop(this, None)
        target.guests.add(this)
        for play in [play for peer in peers.values() if isinstance(peer, Worker) for play in peer.plays]:
            if play.places.get(call.trajectory) == (self.address, call.attempt):
                sending.outcome = Moved(tokens=3, nbytes=12)

    def reply(self, sending: Sending) -> None:
        """What became of a move arrives."""
        self.sendings.remove(sending)
        if isinstance(sending.outcome, Moved):
            sending.answer.set_result(sending.outcome)
        elif sending.outcome is not None:
            sending.answer.set_exception(sending.outcome)

    def go_on(self, place: int, peers: Mapping[str, Any]) -> None:
        """Everything that is being answered here goes on under a version that came; or the controller hears of it."""
        call, answer, interrupted = self.switchings.pop(place)
        if interrupted is not None:
            answer.set_result(switched(*interrupted, prefilled_tokens=len(interrupted)))
            return
        self.under = call.version
        plays = [play for peer in peers.values() if isinstance(peer, Worker) and peer.alive for play in peer.plays]
        here = [(play, t, at[1]) for play in plays for t, at in play.places.items() if self._has(play, t)]
        interrupted = [(t, attempt, len(play.sampled[t])) for play, t, attempt in here]
        self.switchings.append((call, answer, interrupted))

    def _has(self, play: Play, trajectory: int) -> bool:
        place = play.places[trajectory]
        here = isinstance(place, tuple) and place[0] == self.address
        return here and bool(play.sampled.get(trajectory)) and trajectory not in play.done

    async def close(self) -> None:
        gone = WireError(f"the client of {self.address} was closed during the call")
        for sending in self.sendings:
            sending.answer.set_exception(gone)
        for _, switching, _ in self.switchings:
            switching.set_exception(gone)
        self.sendings.clear()
        self.switchings.clear()
        await super().close()

    def load(self, *, live: set[int]) -> None:
        """The oldest version asked for arrives, unless the trainer has retired it."""
        version = next(r.version for (m, r), (_, f) in zip(self.asked, self._waiting, strict=True) if not f.done())
        if version not in live:
            self.answer("load_version", WireError(f"version {version} was retired"))
            return
        if self._live_versions == 1:
            self.serves.clear()
        self.serves.add(version)
        self.answer("load_version", loaded(version))


class Worker(Peer):
    """A process of an environment worker."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.unit = ""
        """The storage unit that it puts into; "" while it has not asked for one."""
        self.alive = True
        self.lost: set[str] = set()
        self.asking: asyncio.Task[WorkItem | None] | None = None
        self.plays: list[Play] = []
        self.mail: list[Any] = []

    def sample(self, play: Play, trajectory: int, instance: InstancePeer) -> None:
        """One of three tokens, under the version of now. What waits until its instance has switched goes on later."""
        version = max(play.item.version, instance.under)
        if version not in instance.serves:
            assert instance.switchings, "asked for a version that is not there"
            return
        tokens = play.sampled.setdefault(trajectory, [])
        tokens.append(version)
        if len(tokens) == 3:
            play.done.add(trajectory)
            self.mail.append(play.finished(trajectory))

    def hear(self) -> None:
        """The oldest of the controller's words arrives."""
        number = next(n for n, (_, future) in enumerate(self._waiting) if not future.done())
        method, request = self.asked[number]
        if method == "instance_lost":
            self.lost.add(request.address)
        elif method == "unit_lost" and self.unit == request.address:
            self.unit = ""
        self.answer(method)

    @property
    def is_told(self) -> bool:
        return any(not future.done() for _, future in self._waiting)


class Unit:
    """A storage unit's client at the ledger: what it is asked to free is gone at once."""

    def __init__(self, rows: set[int]) -> None:
        self._rows = rows

    def submit(self, method: str, rows: Any, **_: Any) -> asyncio.Future[None]:
        assert method == "delete"
        self._rows.difference_update(rows.tolist())
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


@dataclass(frozen=True)
class Putting:
    """Rows that are on their way into a storage unit."""

    unit: str
    worker: Worker
    play: Play
