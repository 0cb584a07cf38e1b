"""Calls from code without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.contract import Batch, Ragged
from headrace.errors import ContractError, DeadlineError, EngineError, SilenceError, WireError
from headrace.wire import BlockingClient, Keys, Server, ipc_address, rpc, tcp_address


class Service:
    def __init__(self) -> None:
        self.held: list[asyncio.Future[int]] = []
        self.holding = threading.Event()
        self.cancelled = threading.Event()

    @rpc
    def double(self, request: int) -> int:
        return 2 * request

    @rpc
    def fail(self, request: None) -> None:
        raise EngineError("what happened", origin="run.toml:3", fix="do that")

    @rpc
    def echo(self, request: Batch) -> Batch:
        return request

    @rpc
    def hold(self, request: int) -> Any:
        self.held.append(asyncio.get_running_loop().create_future())
        self.held[-1].add_done_callback(lambda done: self.cancelled.set() if done.cancelled() else None)
        self.holding.set()
        return self.held[-1]

    @rpc
    def let_go(self, request: list[int]) -> None:
        for place in request:
            self.held[place].set_result(place)


class Serving:
    def __init__(self, address: str, keys: Keys | None = None) -> None:
        self.service = Service()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = Server(self.service, address=address, keys=keys)
        self.address = self._do(self._server.start())

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def close(self) -> None:
        self._do(self._server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    tmp_path.chmod(0o700)
    running = Serving(ipc_address(str(tmp_path), "service"))
    yield running
    running.close()


@pytest.fixture
def client(serving: Serving) -> Iterator[BlockingClient]:
    made = BlockingClient(serving.address)
    yield made
    made.close()


def test_a_call_gives_what_the_method_returns(client: BlockingClient) -> None:
    assert client.call("double", 21, reply=int, deadline=5) == 42
    batch = Batch(rows=np.arange(2), columns={"tokens": Ragged.from_arrays([np.arange(30_000), np.arange(2)])})
    echoed = client.call("echo", batch, reply=Batch, deadline=5)
    assert echoed.ragged("tokens")[0].tolist() == list(range(30_000))


def test_an_error_arrives_as_what_it_is(client: BlockingClient) -> None:
    with pytest.raises(EngineError, match="what happened") as caught:
        client.call("fail", deadline=5)
    assert (caught.value.origin, caught.value.fix) == ("run.toml:3", "do that")
    with pytest.raises(WireError, match="the reply to double"):
        client.call("double", 1, reply=str, deadline=5)


def test_several_calls_may_be_under_way_and_their_replies_come_in_any_order(client: BlockingClient) -> None:
    sent = [client.send("hold", place, deadline=5) for place in range(3)]
    client.call("let_go", [2, 0, 1], deadline=5)
    assert [client.receive(call, int) for call in sent] == [0, 1, 2]


def test_a_call_ends_at_its_deadline_says_what_was_awaited_and_is_cancelled(
    serving: Serving, client: BlockingClient
) -> None:
    with pytest.raises(SilenceError, match=r"no reply to hold from .* in 0\.05 s, awaiting rain"):
        client.call("hold", 0, reply=int, deadline=0.05, awaiting="rain")
    assert serving.service.cancelled.wait(30)
    assert client.call("double", 2, reply=int, deadline=5) == 4


def test_a_deadline_is_a_number_of_seconds(client: BlockingClient) -> None:
    for deadline in (0.0, -1.0, float("nan"), float("inf"), None, "5"):
        with pytest.raises(ContractError, match="deadline"):
            client.call("double", 1, reply=int, deadline=deadline)  # type: ignore[arg-type]  # as somebody might


def test_what_cannot_travel_is_refused_before_it_is_sent(client: BlockingClient) -> None:
    with pytest.raises(ContractError, match="double: values of type object do not travel"):
        client.call("double", object(), deadline=5)
    with pytest.raises(ContractError, match="double: a whole number of more than 64 bits"):
        client.call("double", 1 << 64, deadline=5)


def test_a_second_thread_with_a_call_under_way_is_refused_and_one_after_the_other_served(
    serving: Serving, client: BlockingClient
) -> None:
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(client.call("hold", 0, reply=int, deadline=30)))
    other.start()
    assert serving.service.holding.wait(30)
    for use in (lambda: client.call("double", 1, reply=int, deadline=5), client.close):
        with pytest.raises(ContractError, match=r"'MainThread' uses a client of .* while another does"):
            use()
    friend = BlockingClient(serving.address)
    friend.call("let_go", [0], deadline=5)
    friend.close()
    other.join()
    assert found == [0]
    assert client.call("double", 1, reply=int, deadline=5) == 2


def test_nobody_is_served_without_the_key_of_the_run() -> None:
    keys = Keys.generate()
    serving = Serving(tcp_address("127.0.0.1"), keys)
    friend, stranger = BlockingClient(serving.address, keys=keys), BlockingClient(serving.address, keys=Keys.generate())
    try:
        assert friend.call("double", 2, reply=int, deadline=30) == 4
        with pytest.raises(DeadlineError, match="the handshake failed: the server has another key") as told:
            stranger.call("double", 2, reply=int, deadline=1.0)
        assert "the keys of one run" in told.value.fix
    finally:
        friend.close()
        stranger.close()
        serving.close()
