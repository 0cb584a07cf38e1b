"""Garbage on the wire to a ledger and to a storage unit: refused and counted, and nobody else notices.

What the codec and the server do with garbage is proven in ``tests/core/wire``; here it meets the services that a run
depends on, while a consumer is served. Messages carry no version: a method or a field that one side does not know is
what tells two versions apart.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from headrace.contract import Array, Ragged
from headrace.dataplane import ColumnSchema, DataPlane, Partition, PartitionSpec
from headrace.dataplane.messages import Described, Fetch, LeaseCall, LeaseRef, LostCall, Note, Notes, Put, StatsCall
from headrace.dataplane.serve import serve_ledger, serve_unit
from headrace.errors import ContractError, DeadlineError, HeadraceError, RunError
from headrace.wire import BlockingClient, Keys, RefusedError, Server, tcp_address
from headrace.wire.codec import check_limits
from headrace.wire.messages import Call, Cancel
from headrace_storage.memory import MemoryStorage
from support.data_plane import Services, soon
from support.garbage import LIMITS, MESSAGES, NEW, PATIENCE, ROWS, SPEC, frames_of


class Garbled:
    """A data plane with limits that are easily passed, a peer that says anything, a consumer that must not notice."""

    def __init__(self, services: Services, servers: dict[str, Server]) -> None:
        self.servers = servers
        self.addresses = {"ledger": services.ledger, "unit": ""}
        self.partition: Partition = services.plane().create(SPEC)
        described = services.plane().client().call("describe", "phase", reply=Described, deadline=PATIENCE)
        (self.addresses["unit"],) = described.units
        self._context: zmq.Context[Any] = zmq.Context()

    def say(self, target: str, messages: list[list[bytes]]) -> None:
        with self._context.socket(zmq.DEALER) as peer:
            peer.linger = 10_000
            peer.connect(self.addresses[target])
            for message in messages:
                peer.send_multipart(message)

    def refused(self, target: str) -> int:
        return sum(self.servers[target].refused.values())

    def cycle(self) -> None:
        """What another client does meanwhile."""
        rows = put(self.partition, 2)
        held = self.partition.lease("train", 1)
        assert held.rows.tolist() == rows.tolist()
        assert [part.tolist() for part in self.partition.get(held).ragged("tokens")] == [[0, 1, 2]] * 2
        self.partition.acknowledge(held)
        assert self.partition.stats().rows == 0

    def close(self) -> None:
        self._context.term()


def put(partition: Partition, count: int) -> Array:
    tokens = Ragged.from_arrays([np.arange(3, dtype=np.int32)] * count)
    return partition.put({"tokens": tokens, "reward": np.zeros(count, np.float32)})


@pytest.fixture
def garbled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Garbled]:
    tmp_path.chmod(0o700)
    servers: list[Server] = []

    def recorded(*what: object, **where: Any) -> Server:
        servers.append(Server(*what, **where, limits=LIMITS))
        return servers[-1]

    monkeypatch.setattr("headrace.dataplane.serve.Server", recorded)
    services = Services(tmp_path)
    services.unit()
    plane = Garbled(services, dict(zip(("ledger", "unit"), servers, strict=True)))
    yield plane
    plane.close()
    services.close()


# ---------------------------------------------------------------- what no service hears of


@pytest.mark.parametrize("target", ["ledger", "unit"])
def test_every_damaged_message_is_counted_and_another_client_does_not_notice(garbled: Garbled, target: str) -> None:
    chance, said = Random(7), 0
    for _ in range(20):
        messages = [damaged(chance, MESSAGES[target]) for _ in range(50)]
        refused = [message for message in messages if is_refused(garbled.servers[target], message)]
        garbled.say(target, refused)
        said += len(refused)
        garbled.cycle()
    assert said > 400
    soon(lambda: garbled.refused(target) == said)
    garbled.cycle()
    other = "unit" if target == "ledger" else "ledger"
    assert not garbled.servers[other].refused


def damaged(chance: Random, messages: list[tuple[str, object]]) -> list[bytes]:
    frames = frames_of(*chance.choice(messages), number=chance.randrange(1, 1 << 30))
    header, place = frames[0], chance.randrange(len(frames[0]))
    how = chance.randrange(8)
    if how == 0:
        frames[0] = header[:place]
    elif how == 1:
        frames[0] = header + chance.randbytes(chance.randrange(1, 9))
    elif how == 2:
        frames[0] = chance.randbytes(len(header))
    elif how == 3:
        frames[0] = header[:place] + chance.randbytes(4) + header[place:]
    elif how == 4 and len(frames) > 1:
        frames.pop()
    elif how == 5 and len(frames) > 1:
        last = frames.pop()
        frames.append(last[: chance.randrange(len(last))])
    elif how == 6 and len(frames) > 1:
        frames[-1] += chance.randbytes(3)
    else:
        flipped = bytearray(header)
        flipped[place] ^= 1 << chance.randrange(8)
        frames[0] = bytes(flipped)
    return frames


def is_refused(server: Server, frames: list[bytes]) -> bool:
    """Whether a message is no call at all; by chance it may be one, of something else."""
    try:
        message = msgspec.msgpack.decode(frames[0], type=Call[msgspec.Raw] | Cancel)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return True
    if isinstance(message, Cancel):
        return False
    method = server._methods.get(message.method)
    if method is None:
        return True
    try:
        check_limits(len(message.body), frames[1:], LIMITS)
        method.request.decode(message.body, [bytearray(frame) for frame in frames[1:]])
    except RefusedError:
        return True
    return False


FRAMED = {
    "ledger": ("note", Notes(1, [Note("phase", np.arange(4000), 4000, ("reward",), ROWS, ROWS, 0)])),
    "unit": ("delete", np.arange(4000)),
}
"""Messages with an array in a frame of its own."""
Garble = Callable[[str], list[bytes]]


def first(request: object) -> Garble:
    """Of a method that the service has."""
    return lambda target: frames_of(MESSAGES[target][0][0], request)


def framed(change: Callable[[bytes, bytes], list[bytes]]) -> Garble:
    """A message with one array, changed."""

    def garble(target: str) -> list[bytes]:
        head, array = frames_of(*FRAMED[target])
        return change(head, array)

    return garble


@pytest.mark.parametrize("target", ["ledger", "unit"])
@pytest.mark.parametrize(
    ("reason", "garble"),
    [
        ("malformed", lambda _: [b""]),
        ("malformed", lambda _: [b"\x93\x00\x01"]),
        ("malformed", lambda _: [b"\x91" * 100_000]),
        ("unknown method", lambda _: frames_of("close", None)),
        ("unknown method", lambda _: frames_of("_look", None)),
        ("unknown method", lambda _: frames_of("lease_v2", None)),
        ("wrong type", first(17.5)),
        ("wrong type", first({"partition": "phase"})),
        ("wrong type", first(np.zeros(10))),
        ("wrong type", first(["phase"])),
        ("bad frame", framed(lambda head, _: [head])),
        ("bad frame", framed(lambda head, _: [head, b"short"])),
        ("bad frame", framed(lambda head, array: [head, array + b"x"])),
        ("bad frame", framed(lambda head, array: [head.replace(b"<i8", b"<O8"), array])),
        ("too many frames", framed(lambda head, array: [head, *[array] * 17])),
        ("too many frames", framed(lambda head, array: [head, *[array] * 5000])),
        ("frame too large", framed(lambda head, _: [head, b"x" * (LIMITS.frame_bytes + 1)])),
        ("header too large", first("x" * (LIMITS.header_bytes + 1))),
    ],
)
def test_garbage_is_refused_by_its_reason(garbled: Garbled, target: str, reason: str, garble: Garble) -> None:
    garbled.say(target, [garble(target)])
    soon(lambda: garbled.refused(target) == 1)
    assert garbled.servers[target].refused == {reason: 1}
    garbled.cycle()


@pytest.mark.parametrize("target", ["ledger", "unit"])
def test_a_frame_far_over_the_limit_costs_its_sender_the_connection_and_nobody_else(
    garbled: Garbled, target: str
) -> None:
    garbled.say(target, [[b"x" * (3 * LIMITS.frame_bytes)], [b"again"]])
    garbled.cycle()


# ---------------------------------------------------------------- what is a call, of nothing sensible


Nonsense = Callable[[Partition], object]


def tell(method: str, request: object) -> Nonsense:
    return lambda partition: partition.ledger.call(method, request, reply=Any, deadline=5)


def to_unit(method: str, request: object) -> Nonsense:
    return lambda partition: partition._units.client(1, 5, np.zeros(0)).call(method, request, reply=Any, deadline=5)


def lease(groups: int, at_least: int, *, wait: float = 0.1, seconds: float = 1.0, **limits: int) -> Nonsense:
    return tell("lease", LeaseCall("phase", "train", groups, at_least, wait, seconds, **limits))


def spec(**changes: Any) -> PartitionSpec:
    return msgspec.structs.replace(SPEC, name="other", **changes)


@pytest.mark.parametrize(
    ("nonsense", "error", "said"),
    [
        (tell("lease", LeaseCall("none", "train", 1, 1, 0.1, 1.0)), ContractError, "no partition 'none'"),
        (tell("lease", LeaseCall("phase", "nobody", 1, 1, 0.1, 1.0)), ContractError, "no consumer 'nobody'"),
        (lease(0, 0), ContractError, "a lease of 0 groups"),
        (lease(-1, -1), ContractError, "a lease of -1 groups"),
        (lease(2, 0), ContractError, "at least 0"),
        (lease(2, 3), ContractError, "at least 3"),
        (lease(1, 1, token_budget=-1), ContractError, "token_budget = -1"),
        (lease(1, 1, min_version=-1), ContractError, "min_version = -1"),
        (lease(1, 1, wait=math.nan), ContractError, "a wait of nan"),
        (lease(1, 1, wait=math.inf), ContractError, "a wait of inf"),
        (lease(1, 1, wait=-1.0), ContractError, "a wait of -1"),
        (lease(1, 1, seconds=math.nan), ContractError, "held for nan"),
        (lease(1, 1, seconds=math.inf), ContractError, "held for inf"),
        (lease(1, 1, seconds=0.0), ContractError, "held for 0"),
        (tell("extend", LeaseRef("phase", 0, math.nan)), ContractError, "held for nan"),
        (tell("lost", LostCall("phase", 0, math.nan, 0)), ContractError, "a wait of nan"),
        (tell("lost", LostCall("phase", 0, 0.0, -1)), ContractError, "-1 lost groups"),
        (tell("acknowledge", LeaseRef("phase", -1)), RunError, "not held"),
        (tell("release", LeaseRef("phase", 1 << 60)), RunError, "not held"),
        (tell("extend", LeaseRef("phase", 99, 1.0)), RunError, "not held"),
        (tell("describe", "none"), ContractError, "no partition"),
        (tell("stats", StatsCall("")), ContractError, "no partition"),
        (tell("lost", LostCall("none", 1, 0.0, 0)), ContractError, "no partition"),
        (tell("create", spec(columns={"a": ColumnSchema("float33")})), ContractError, "float33"),
        (
            tell("create", spec(columns={"a/b": ColumnSchema("int8")}, consumers={}, length_of="")),
            ContractError,
            "slash",
        ),
        (tell("create", spec(consumers={"train": ("absent",)})), ContractError, "absent"),
        (tell("create", spec(consumers={"train": ()})), ContractError, "reads no column"),
        (tell("create", spec(by_row=("nobody",))), ContractError, "by_row of partition 'other' names nobody"),
        (tell("create", spec(columns={"a": ColumnSchema("object")})), ContractError, "dtype object do not travel"),
        (tell("create", spec(columns={"a": ColumnSchema("int8", (-1,))})), ContractError, "shape [-1]"),
        (tell("create", spec(group_size=0)), ContractError, "group_size = 0"),
        (tell("create", spec(length_of="reward")), ContractError, "length_of"),
        (to_unit("put", Put("none", NEW, {"reward": np.zeros(2, np.float32)}, 0)), ContractError, "no partition"),
        (to_unit("put", Put("phase", NEW, {}, 0)), ContractError, "without columns"),
        (to_unit("put", Put("phase", NEW, {"reward": np.array(1, np.float32)}, 0)), ContractError, "is one number"),
        (to_unit("put", Put("phase", NEW, {"reward": np.zeros(2, ">f4")}, 0)), ContractError, "another byte order"),
        (to_unit("put", Put("phase", NEW, {"reward": np.zeros(2, np.int32)}, 0)), ContractError, "a put gave dense"),
        (to_unit("put", Put("phase", NEW, {"reward": np.zeros((2, 2), np.float32)}, 0)), ContractError, "[2]"),
        (to_unit("put", Put("phase", NEW, {"other": np.zeros(2, np.float32)}, 0)), ContractError, "does not exist"),
        (to_unit("put", Put("phase", NEW, {"reward": np.zeros(3, np.float32)}, 0)), ContractError, "whole groups"),
        (to_unit("put", Put("phase", ROWS, {"reward": np.zeros(3, np.float32)}, 0)), ContractError, "4 rows"),
        (to_unit("get", Fetch(ROWS, ("tokens",), "phase")), HeadraceError, "row"),
        (to_unit("get", Fetch(ROWS - 9, ("absent",), "phase")), HeadraceError, "absent"),
    ],
)
def test_a_call_of_nothing_sensible_is_told_so_and_changes_nothing(
    garbled: Garbled, nonsense: Nonsense, error: type[HeadraceError], said: str
) -> None:
    garbled.cycle()
    before = garbled.partition.stats()
    with pytest.raises(error) as raised:
        nonsense(garbled.partition)
    assert said in str(raised.value)
    assert garbled.partition.stats() == before
    garbled.cycle()


@pytest.mark.parametrize("rows", [[-2, -1], [10**6, 10**6 + 1], [1 << 62, 0]])
def test_rows_that_never_were_are_refused_by_name_and_deleted_without_harm(garbled: Garbled, rows: list[int]) -> None:
    garbled.cycle()
    named = np.array(rows)
    noted = garbled.partition.try_put({"reward": np.zeros(2, np.float32)}, rows=named)
    assert set(noted.refused.tolist()) <= {2, 3}
    garbled.partition._units.client(1, 5, np.zeros(0)).call("delete", named, deadline=5)
    garbled.partition.drop([row // 2 for row in rows])
    assert garbled.partition.unit_stats()[0].nbytes == 0
    garbled.cycle()


# ---------------------------------------------------------------- who has no key


async def test_a_peer_without_the_run_s_keys_is_refused_by_ledger_and_unit_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers: list[Server] = []
    reached: list[asyncio.Future[str]] = [asyncio.get_running_loop().create_future() for _ in range(2)]

    def recorded(*what: object, **where: Any) -> Server:
        servers.append(Server(*what, **where))
        return servers[-1]

    monkeypatch.setattr("headrace.dataplane.serve.Server", recorded)
    keys, others = Keys.generate(), Keys.generate()
    half = Keys.from_dict({**others.to_dict(), "server_public": keys.server_public})
    serving = [asyncio.create_task(serve_ledger(tcp_address("127.0.0.1"), keys=keys, ready=reached[0].set_result))]
    ledger = await reached[0]
    unit_at = tcp_address("127.0.0.1")
    serving.append(
        asyncio.create_task(
            serve_unit(unit_at, MemoryStorage(None), ledger=ledger, keys=keys, ready=reached[1].set_result)
        )
    )
    addresses = [ledger, await reached[1]]

    def knock(address: str, with_keys: Keys, method: str) -> None:
        client = BlockingClient(address, keys=with_keys)
        with pytest.raises(DeadlineError):
            client.call(method, "phase", deadline=0.5)
        client.close()

    def work() -> None:
        plane = DataPlane(ledger, connect=lambda address: BlockingClient(address, keys=keys))
        partition = plane.create(SPEC)
        rows = put(partition, 2)
        for address, method in zip(addresses, ("describe", "delete"), strict=True):
            knock(address, half, method)
            knock(address, others, method)
        held = partition.lease("train", 1)
        assert partition.get(held).rows.tolist() == rows.tolist()
        plane.close()

    await asyncio.to_thread(work)
    for server in servers:  # a client that leaves while it tries again is counted too
        assert {"wrong key"} <= set(server.refused) <= {"wrong key", "no handshake"}
    for task in reversed(serving):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
