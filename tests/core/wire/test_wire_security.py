from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from headrace.errors import DeadlineError, WireError
from headrace.wire import Client, Keys, Server, ipc_address, rpc, tcp_address


class Secret:
    def __init__(self) -> None:
        self.asked = 0

    @rpc
    async def tell(self, request: None) -> str:
        self.asked += 1
        return "secret"

    @rpc
    async def stay(self, request: None) -> None:
        await asyncio.Event().wait()


async def soon(condition: Callable[[], bool]) -> None:
    """Until the condition holds; fails after 30 s."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.001)


async def tell(address: str, keys: Keys, *, deadline: float = 5) -> str:
    client = Client(address, keys=keys)
    try:
        return await client.call("tell", reply=str, deadline=deadline)
    finally:
        await client.close()


async def let_in(client: Client) -> None:
    """Call until a reply comes: a call may still have been lost with the refused connection."""
    for _ in range(50):
        with suppress(DeadlineError):
            assert await client.call("tell", reply=str, deadline=0.2) == "secret"
            return
    raise AssertionError("the client was never let in")


async def test_a_holder_of_the_run_s_keys_is_answered_over_tcp() -> None:
    keys = Keys.generate()
    server = Server(Secret(), address=tcp_address("127.0.0.1"), keys=keys)
    address = await server.start()
    assert not address.endswith(":0")
    assert await tell(address, Keys.from_dict(keys.to_dict())) == "secret"
    await server.close()
    await server.close()


async def test_keys_also_guard_an_ipc_address(tmp_path: Path) -> None:
    keys = Keys.generate()
    server = Server(Secret(), address=ipc_address(str(tmp_path), "a"), keys=keys)
    address = await server.start()
    assert await tell(address, keys) == "secret"
    client = Client(address)
    with pytest.raises(
        DeadlineError, match=r"the handshake failed: the server has another key .* or one side has none"
    ) as told:
        await client.call("tell", reply=str, deadline=1.0)
    assert "the keys of one run" in told.value.fix
    await client.close()
    await server.close()


async def test_a_client_that_was_refused_is_let_in_by_another_server_at_the_same_address(tmp_path: Path) -> None:
    address = ipc_address(str(tmp_path), "a")
    client = Client(address)
    for keys in (Keys.generate(), None, Keys.generate(), None):
        server = Server(Secret(), address=address, keys=keys)
        await server.start()
        if keys is None:
            await let_in(client)
        else:
            for _ in range(3):
                with pytest.raises(DeadlineError):
                    await client.call("tell", reply=str, deadline=0.1)
        await server.close()
    await client.close()


async def test_a_peer_with_the_server_s_public_key_but_another_client_key_gets_nothing() -> None:
    keys, other = Keys.generate(), Keys.generate()
    service = Secret()
    server = Server(service, address=tcp_address("127.0.0.1"), keys=keys)
    address = await server.start()
    half = {**other.to_dict(), "server_public": keys.server_public}
    with pytest.raises(DeadlineError, match="the handshake failed: the server does not know this client's key") as told:
        await tell(address, Keys.from_dict(half), deadline=1.0)
    assert "the keys of one run" in told.value.fix
    await soon(lambda: server.refused == {"wrong key": 1})
    assert service.asked == 0
    assert await tell(address, keys) == "secret"
    await server.close()


async def test_a_peer_with_another_server_key_gets_nothing_is_counted_and_hears_why() -> None:
    keys = Keys.generate()
    service = Secret()
    server = Server(service, address=tcp_address("127.0.0.1"), keys=keys)
    address = await server.start()
    with pytest.raises(DeadlineError, match="the handshake failed: the server has another key"):
        await tell(address, Keys.generate(), deadline=1.0)
    await soon(lambda: set(server.refused) == {"wrong key"})
    assert service.asked == 0
    assert await tell(address, keys) == "secret"
    await server.close()


async def test_one_that_got_in_and_then_waits_in_vain_hears_nothing_of_handshakes(tmp_path: Path) -> None:
    keys = Keys.generate()
    address = ipc_address(str(tmp_path), "a")
    client = Client(address, keys=keys)
    with pytest.raises(DeadlineError) as nobody:
        await client.call("tell", reply=str, deadline=0.05)
    server = Server(Secret(), address=address, keys=keys)
    await server.start()
    await let_in(client)
    assert client._handshakes is None, "nothing is watched any more"
    with pytest.raises(DeadlineError) as slow:
        await client.call("stay", deadline=0.05)
    assert "key" not in nobody.value.fix + slow.value.fix
    await client.close()
    await server.close()


async def test_a_peer_without_any_key_gets_nothing_and_the_server_lives_on() -> None:
    keys = Keys.generate()
    service = Secret()
    server = Server(service, address=tcp_address("127.0.0.1"), keys=keys)
    address = await server.start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(address)
        plain.send_multipart([b"\x93\x00\x01\xa4tell"])
        assert not await asyncio.to_thread(plain.poll, 200)
    await soon(lambda: set(server.refused) == {"no handshake"})
    assert service.asked == 0
    assert await tell(address, keys) == "secret"
    await server.close()


async def test_when_nobody_answers_authentication_requests_nobody_is_let_in() -> None:
    keys = Keys.generate()
    server = Server(Secret(), address=tcp_address("127.0.0.1"), keys=keys)
    address = await server.start()
    assert server._gate is not None
    server._gate.close()
    with pytest.raises(DeadlineError):
        await tell(address, keys, deadline=0.2)
    await server.close()


async def test_a_client_does_not_talk_to_a_server_that_lacks_the_server_key() -> None:
    keys, other = Keys.generate(), Keys.generate()
    impostor = Secret()
    half = {**other.to_dict(), "client_public": keys.client_public, "client_secret": keys.client_secret}
    server = Server(impostor, address=tcp_address("127.0.0.1"), keys=Keys.from_dict(half))
    address = await server.start()
    with pytest.raises(DeadlineError):
        await tell(address, keys, deadline=0.2)
    assert impostor.asked == 0
    await server.close()


async def test_raw_bytes_on_the_tcp_port_do_not_hurt_the_server() -> None:
    keys = Keys.generate()
    server = Server(Secret(), address=tcp_address("127.0.0.1"), keys=keys)
    address = await server.start()
    host, port = address.removeprefix("tcp://").split(":")
    rng = random.Random(0)
    for length in (0, 1, 10, 64, 65, 1000):
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(rng.randbytes(length))
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
    await soon(lambda: server.refused["no handshake"] >= 1)
    assert await tell(address, keys) == "secret"
    await server.close()


async def test_garbage_frames_are_counted_and_the_server_lives_on(tmp_path: Path) -> None:
    service = Secret()
    server = Server(service, address=ipc_address(str(tmp_path), "fuzz"))
    address = await server.start()
    rng = random.Random(1)
    valid = b"\x95\x00\x01\xa4tell\xcb\x40\x14\x00\x00\x00\x00\x00\x00\xc0"
    messages = [[rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(1, 5))] for _ in range(300)]
    for _ in range(300):
        damaged = bytearray(valid)
        damaged[rng.randrange(len(valid))] = rng.randrange(256)
        messages.append([bytes(damaged[: rng.randrange(1, len(valid) + 1)])])
    messages.append([b"\x91" * 100_000])
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = -1
        peer.connect(address)
        for message in messages:
            peer.send_multipart(message)
    client = Client(address)
    assert await client.call("tell", reply=str, deadline=5) == "secret"
    await soon(lambda: sum(server.refused.values()) > 500)
    assert set(server.refused) <= {"malformed", "wrong type", "unknown method", "bad frame"}
    assert await client.call("tell", reply=str, deadline=5) == "secret"
    await client.close()
    await server.close()


async def test_a_call_number_in_use_cannot_be_taken_twice(tmp_path: Path) -> None:
    server = Server(Secret(), address=ipc_address(str(tmp_path), "twice"))
    address = await server.start()
    valid = b"\x95\x00\x01\xa4tell\xcb\x40\x14\x00\x00\x00\x00\x00\x00\xc0"
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = -1
        peer.connect(address)
        for _ in range(2):
            peer.send_multipart([valid])
        await soon(lambda: server.refused["malformed"] == 1)
        assert await asyncio.to_thread(peer.poll, 5000)
    await server.close()


async def test_tcp_without_keys_is_refused_on_both_sides() -> None:
    address = tcp_address("127.0.0.1")
    with pytest.raises(WireError, match="without keys") as raised:
        Client(address)
    assert "ipc" in raised.value.fix
    server = Server(Secret(), address=address)
    with pytest.raises(WireError, match="without keys"):
        await server.start()
    await server.close()


@pytest.mark.parametrize("address", ["inproc://a", "udp://127.0.0.1:1", "tcp://", "ipc://", "nonsense", ""])
def test_an_address_of_another_kind_is_refused(address: str) -> None:
    with pytest.raises(WireError, match="neither ipc nor tcp"):
        Client(address, keys=Keys.generate())


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777])
def test_a_socket_directory_that_others_can_enter_is_refused_with_a_fix(tmp_path: Path, mode: int) -> None:
    os.chmod(tmp_path, mode)
    with pytest.raises(WireError, match=f"mode {mode:04o}") as raised:
        ipc_address(str(tmp_path), "a")
    assert raised.value.fix == f"chmod 700 {tmp_path}"


def test_a_socket_path_is_at_most_107_bytes(tmp_path: Path) -> None:
    room = 107 - len(str(tmp_path)) - len("/.sock")
    assert ipc_address(str(tmp_path), "x" * room).endswith("x.sock")
    with pytest.raises(WireError, match="has 108 bytes, the system allows 107") as raised:
        ipc_address(str(tmp_path), "x" * (room + 1))
    assert "shorter" in raised.value.fix


def test_a_socket_directory_must_exist(tmp_path: Path) -> None:
    with pytest.raises(WireError, match="cannot be used"):
        ipc_address(str(tmp_path / "absent"), "a")


def test_an_ipv6_host_is_bracketed() -> None:
    assert tcp_address("::1", 80) == "tcp://[::1]:80"
    assert tcp_address("10.0.0.1") == "tcp://10.0.0.1:0"


def test_keys_are_text_that_a_repr_does_not_reveal() -> None:
    keys = Keys.generate()
    assert Keys.from_dict(keys.to_dict()) == keys
    assert keys.server_secret not in repr(keys)
    assert keys.client_secret not in repr(keys)
    assert Keys.generate() != keys


def test_keys_that_are_incomplete_or_cut_are_refused() -> None:
    values = Keys.generate().to_dict()
    with pytest.raises(WireError, match="39 characters"):
        Keys.from_dict({**values, "client_secret": values["client_secret"][1:]})
    with pytest.raises(WireError, match="were expected"):
        Keys.from_dict({k: v for k, v in values.items() if k != "client_secret"})
    for wrong in (None, [], {**values, "client_secret": None}, {**values, 5: "key"}):
        with pytest.raises(WireError, match=r"were expected") as refused:
            Keys.from_dict(wrong)  # type: ignore[arg-type]
        assert "Keys.generate()" in refused.value.fix
