"""A run's network: the same calls over ipc and tcp, and keys that nobody reads by accident."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headrace.errors import DeadlineError, WireError
from headrace.wire import Network, rpc


class Service:
    @rpc
    async def tell(self, request: None) -> str:
        return "told"


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
async def test_a_server_is_reached_at_the_address_it_reports(tmp_path: Path, host: str | None) -> None:
    network = Network.create(str(tmp_path), host=host)
    server = network.server(Service(), name="service")
    address = await server.start()
    assert not address.endswith(":0")
    client = network.client(address)
    assert await client.call("tell", reply=str, deadline=5) == "told"
    await client.close()
    await server.close()


def test_ipc_names_a_socket_in_the_private_directory_and_needs_no_keys(tmp_path: Path) -> None:
    network = Network.create(str(tmp_path))
    assert network.address("service") == f"ipc://{tmp_path}/service.sock"
    assert network.keys is None


async def test_another_run_s_keys_open_nothing(tmp_path: Path) -> None:
    ours, theirs = (Network.create(str(tmp_path), host="127.0.0.1") for _ in range(2))
    server = ours.server(Service(), name="service")
    address = await server.start()
    stranger = theirs.client(address)
    with pytest.raises(DeadlineError):
        await stranger.call("tell", reply=str, deadline=0.2)
    await stranger.close()
    client = ours.client(address)
    assert await client.call("tell", reply=str, deadline=5) == "told"
    await client.close()
    await server.close()


def test_tcp_without_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WireError, match="without keys"):
        Network.create(str(tmp_path)).client("tcp://127.0.0.1:1")


def test_a_network_travels_with_its_keys_and_its_text_hides_their_secrets(tmp_path: Path) -> None:
    network = Network.create(str(tmp_path), host="127.0.0.1")
    assert msgspec.json.decode(msgspec.json.encode(network), type=Network) == network
    assert network.keys is not None
    for text in (repr(network), str(network), repr(network.client("tcp://127.0.0.1:1"))):
        assert network.keys.server_secret not in text
        assert network.keys.client_secret not in text
