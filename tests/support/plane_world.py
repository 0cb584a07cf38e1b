"""A data plane in one thread on a clock of its own: the real services and partitions, without sockets.

What is said is encoded and decoded as on the wire and counted in bytes. Time passes only when a test says so, or while
a call waits; so everything that happens is the same in every run.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any, NamedTuple

import pytest

from headrace.contract import Storage
from headrace.dataplane import DataPlane
from headrace.dataplane.serve import serve_ledger, serve_unit
from headrace.errors import HeadraceError, SilenceError
from headrace.wire import Meanwhile, encode
from headrace.wire.blocking import TURN_SECONDS
from headrace.wire.codec import decoder_for
from headrace.wire.methods import Method, methods_of
from headrace.wire.refusal import RefusedError, to_caller
from headrace_storage.memory import MemoryStorage

LEDGER = "ledger"
TURNS = 25
"""Of the loop: more than the longest chain of messages takes."""
FIRST_STEP, LONGEST_STEP = 1e-6, 0.25
"""Of the clock while a call waits, in seconds; each step is twice the one before."""


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time stands still."""

    now = 0.0

    def time(self) -> float:
        return self.now


class Flight(NamedTuple):
    """A call under way."""

    answer: asyncio.Future[Any]
    deadline: float


class World:
    """A ledger, with a storage unit in its process where ``own``, and units that join and are lost."""

    def __init__(self, *, own: bool = False, shards: int = 1) -> None:
        self.clock = Clock()
        self.bytes_to: Counter[tuple[str, str]] = Counter()
        """Requests, by address and method."""
        self.bytes_from: Counter[tuple[str, str]] = Counter()
        """Their replies."""
        self.storages: dict[str, Storage] = {}
        self._services: dict[str, dict[str, Method]] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr("headrace.dataplane.serve.Server", lambda *what, **where: Server(self, *what, **where))
        self._patch.setattr("headrace.dataplane.serve.Client", lambda address, keys: Client(self, address))
        for name, module in list(sys.modules.items()):
            if name.startswith("headrace.dataplane.") and hasattr(module, "monotonic"):
                self._patch.setattr(module, "monotonic", self.clock.time)
        self._patch.setattr("headrace.dataplane.sharded.first_answered", self.first_answered)
        if own:
            self.storages[LEDGER] = MemoryStorage(None)
        self.ledgers = [LEDGER, *(f"{LEDGER}-{shard}" for shard in range(1, shards))]
        for ledger in self.ledgers:
            self._begin_ledger(ledger)

    def unit(self, *, capacity: int = 0, storage: Storage | None = None, address: str = "") -> str:
        """Another storage unit, which has joined; returns its address."""
        address = address or f"unit-{len(self._serving)}"
        kept = self.storages[address] = MemoryStorage(None) if storage is None else storage
        self._begin(address, serve_unit(address, kept, ledger=self.ledgers, capacity=capacity, ready=_no_news))
        return address

    def unit_after(self, seconds: float, address: str) -> None:
        """A storage unit joins when so much time has passed."""
        kept = self.storages[address] = MemoryStorage(None)
        serving = serve_unit(address, kept, ledger=self.ledgers, ready=_no_news)

        def begin() -> None:
            self._serving[address] = self.clock.create_task(serving)

        self.clock.call_later(seconds, begin)

    def _begin_ledger(self, ledger: str) -> None:
        place = self.ledgers.index(ledger)
        kept = self.storages.get(ledger)
        self._begin(ledger, serve_ledger(ledger, kept, shard=place, shards=len(self.ledgers), ready=_no_news))

    def restart(self, *ledgers: str) -> None:
        """Ledgers end without a word and others begin at their addresses; all units are begun anew too."""
        units = [address for address in self._serving if address not in self.ledgers]
        for address in (*ledgers, *units):
            self._end(address)
        for ledger in ledgers:
            if ledger in self.storages:
                self.storages[ledger] = MemoryStorage(None)
            self._begin_ledger(ledger)
        for address in units:
            self.unit(address=address)

    def _begin(self, address: str, serving: Any) -> None:
        self._serving[address] = self.clock.create_task(serving)
        self.settle()
        assert not self._serving[address].done(), self._serving[address]

    def lose(self, address: str) -> None:
        """A unit ends without a word."""
        del self.storages[address]
        self._end(address)

    def _end(self, address: str) -> None:
        del self._services[address]
        self._serving[address].cancel()
        self.settle()

    def stall(self, address: str, seconds: float) -> None:
        """A unit stands still, and then goes on without having noticed."""
        methods = self._services[address]
        self._serving[address].cancel()
        self.settle()
        self.wait(seconds)
        self.serve(address, methods)

    def plane(self) -> DataPlane:
        return DataPlane(self.ledgers, connect=lambda address: BlockingClient(self, address))  # type: ignore[arg-type, return-value]

    def client(self, address: str) -> Client:
        """Of somebody who need not wait for one answer before the next call."""
        return Client(self, address)

    def say(self, address: str, method: str, request: object, reply: Any = NoneType) -> Flight:
        """A call by somebody who goes on meanwhile."""
        flight = Flight(self.client(address).submit(method, request, reply=reply, deadline=1000.0), 1000.0)
        self.settle()
        return flight

    def serve(self, address: str, methods: dict[str, Method] | None) -> None:
        """Who answers there; None for nobody any more."""
        self._services.pop(address, None)
        if methods is not None:
            self._services[address] = methods

    def delay(self, address: str, name: str, seconds: float) -> None:
        """From now on a service takes as long to answer calls of a method."""
        method = self._services[address][name]

        def later(request: object) -> asyncio.Future[Any]:
            answer: asyncio.Future[Any] = self.clock.create_future()
            self.clock.call_later(seconds, lambda: _settle(answer, method.call(request)))
            return answer

        self._services[address][name] = replace(method, call=later)

    def method(self, address: str, name: str) -> Method | None:
        """None where nobody is left to answer."""
        return self._services.get(address, {}).get(name)

    def hold(self, name: str) -> Callable[[], None]:
        """The ledger answers calls of this method when what is returned is called, and not before."""
        methods, calls = self._services[LEDGER], []
        method = methods[name]

        def held(request: Any) -> asyncio.Future[Any]:
            calls.append((request, self.clock.create_future()))
            return calls[-1][1]

        def end(request: Any, answer: asyncio.Future[Any]) -> None:
            answer.set_result(method.call(request))

        def answer_now() -> None:
            self.serve(LEDGER, methods)
            for call in calls:
                self.clock.call_soon(end, *call)
            self.settle()

        self.serve(LEDGER, methods | {name: replace(method, call=held)})
        return answer_now

    def settle(self) -> None:
        """Let everything happen that needs no time."""
        self.clock.run_until_complete(_turns())

    def wait(self, seconds: float) -> None:
        """Time passes, in steps that no beat of a unit is longer than."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + LONGEST_STEP)
            self.settle()

    def first_answered(self, calls: Sequence[tuple[object, Flight]]) -> int:
        """Stands in for :func:`headrace.wire.first_answered`."""
        self.settle()
        end, step = self.clock.now + min(flight.deadline for _, flight in calls), FIRST_STEP
        while True:
            for place, (_, flight) in enumerate(calls):
                if flight.answer.done() or self.clock.now >= end:
                    return place
            self.clock.now = min(end, self.clock.now + step)
            step = min(2 * step, LONGEST_STEP)
            self.settle()

    def outcome(self, flight: Flight, meanwhile: Meanwhile | None = None) -> Any:
        """Wait for the answer to a call."""
        self.settle()
        end, step, looked = self.clock.now + flight.deadline, FIRST_STEP, self.clock.now
        while not flight.answer.done() and self.clock.now < end:
            self.clock.now = min(end, self.clock.now + step)
            step = min(2 * step, LONGEST_STEP)
            self.settle()
            if meanwhile is not None and looked + TURN_SECONDS <= self.clock.now < end and not flight.answer.done():
                looked = self.clock.now
                self._look(flight, meanwhile, end - looked)
        return flight.answer.result()

    def _look(self, flight: Flight, meanwhile: Meanwhile, left: float) -> None:
        try:
            meanwhile(left)
        except HeadraceError:
            flight.answer.cancel()
            raise

    def close(self) -> None:
        for address in reversed(list(self._serving)):
            self._serving[address].cancel()
            self.settle()
        self.clock.close()
        self._patch.undo()


def _no_news(_: str) -> None:
    """Where a service is reached is known."""


async def _turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Server:
    """Stands in for :class:`headrace.wire.Server`."""

    def __init__(self, world: World, *services: object, address: str, keys: object) -> None:
        self.refused: dict[str, int] = {}
        self._world = world
        self._address = address
        self._methods = {name: method for service in services for name, method in methods_of(service).items()}

    async def start(self) -> str:
        self._world.serve(self._address, self._methods)
        return self._address

    async def close(self) -> None:
        self._world.serve(self._address, None)


class Client:
    """Stands in for :class:`headrace.wire.Client`."""

    def __init__(self, world: World, address: str) -> None:
        self._world = world
        self._address = address

    async def call(self, method: str, request: object = None, **told: Any) -> Any:
        return await self.submit(method, request, **told)

    def submit(
        self, method: str, request: object = None, *, reply: Any = NoneType, deadline: float, awaiting: str = ""
    ) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self._world.clock.create_future()
        timer = self._world.clock.call_later(deadline, _expire, answer, f"no reply to {method}, awaiting {awaiting}")
        answer.add_done_callback(lambda _: timer.cancel())
        message = encode(request)
        self._world.bytes_to[self._address, method] += _size(message)
        self._world.clock.call_soon(self._arrive, method, message, reply, answer)
        return answer

    async def close(self) -> None:
        """Nothing is open."""

    def _arrive(self, name: str, message: list[Any], reply: Any, answer: asyncio.Future[Any]) -> None:
        method = self._world.method(self._address, name)
        if method is None or answer.done():
            return
        try:
            given = method.call(method.request.decode(message[0], message[1:]))
        except RefusedError as refusal:
            answer.set_exception(to_caller(name, refusal))
            return
        except Exception as error:  # for the caller, as on the wire
            answer.set_exception(error)
            return
        if not isinstance(given, asyncio.Future):
            self._reply(name, given, reply, answer)
            return
        given.add_done_callback(lambda done: self._kept(name, done, reply, answer))
        answer.add_done_callback(lambda done: given.cancel() if done.cancelled() or done.exception() else None)

    def _kept(self, name: str, done: asyncio.Future[Any], reply: Any, answer: asyncio.Future[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        if answer.done() or done.cancelled():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            self._reply(name, done.result(), reply, answer)

    def _reply(self, name: str, given: Any, reply: Any, answer: asyncio.Future[Any]) -> None:
        message = encode(given)
        self._world.bytes_from[self._address, name] += _size(message)
        self._world.clock.call_soon(_settle, answer, decoder_for(reply).decode(message[0], message[1:]))


class BlockingClient:
    """Stands in for :class:`headrace.wire.BlockingClient`."""

    def __init__(self, world: World, address: str) -> None:
        self._world = world
        self._client = Client(world, address)

    def call(
        self,
        method: str,
        request: object = None,
        *,
        reply: Any = NoneType,
        meanwhile: Meanwhile | None = None,
        **told: Any,
    ) -> Any:
        flight = Flight(self._client.submit(method, request, reply=reply, **told), told["deadline"])
        return self._world.outcome(flight, meanwhile)

    def send(self, method: str, request: object = None, *, deadline: float, awaiting: str = "") -> Flight:
        """The reply is decoded when it is received, if it ever is."""
        answer = self._client.submit(method, request, reply=Any, deadline=deadline, awaiting=awaiting)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        return Flight(answer, deadline)

    def receive(self, sent: Flight, reply: Any, meanwhile: Meanwhile | None = None) -> Any:
        message = encode(self._world.outcome(sent, meanwhile))
        return decoder_for(reply).decode(message[0], message[1:])

    def cancel(self, sent: Flight) -> None:
        sent.answer.cancel()

    def close(self) -> None:
        """Nothing is open."""


def _size(message: list[Any]) -> int:
    return sum(memoryview(frame).nbytes for frame in message)


def _expire(answer: asyncio.Future[Any], message: str) -> None:
    if not answer.done():
        answer.set_exception(SilenceError(message))


def _settle(answer: asyncio.Future[Any], value: Any) -> None:
    if not answer.done():
        answer.set_result(value)
