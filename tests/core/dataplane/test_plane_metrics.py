"""What Prometheus is told of a data plane."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zmq

from headrace.config.network import check_listen
from headrace.contract import Ragged
from headrace.dataplane import ColumnSchema, PartitionSpec
from headrace.errors import ConfigError
from headrace.observe.exposition import MetricsPage
from support.data_plane import Services, soon
from support.garbage import frames_of

pytest.importorskip("prometheus_client", reason="the extra metrics is not installed")

SPEC = PartitionSpec(
    "phase",
    {"tokens": ColumnSchema("int32", ragged=True), "reward": ColumnSchema("float32")},
    {"score": ("tokens",), "train": ("tokens", "reward"), "look": ("reward",)},
    2,
    "tokens",
    by_row=("look",),
)
Samples = dict[tuple[str, ...], float]


class Scraped:
    """A data plane with metrics at a socket."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "metrics")
        self.services = Services(directory, metrics=f"unix:{self.path}")
        self.services.unit(capacity=160)
        self.plane = self.services.plane()
        self.partition = self.plane.create(SPEC)

    def scrape(self) -> Samples:
        """By name and the values of labels, these in the order of the labels' names."""
        from prometheus_client.parser import text_string_to_metric_families

        head, _, text = fetch(self.path, b"GET /metrics HTTP/1.1\r\n\r\n").partition("\r\n\r\n")
        assert head.startswith("HTTP/1.1 200 OK\r\nContent-Type: text/plain")
        return {
            (
                sample.name.removeprefix("headrace_"),
                *(value for _, value in sorted(sample.labels.items())),
            ): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


def fetch(path: str, request: bytes) -> str:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(30)
        peer.connect(path)
        peer.sendall(request)
        return b"".join(iter(lambda: peer.recv(1 << 16), b"")).decode()


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[Scraped]:
    tmp_path.chmod(0o700)
    running = Scraped(tmp_path)
    yield running
    running.services.close()


def tokens(groups: int) -> Ragged:
    return Ragged.from_arrays([np.zeros(5, np.int32)] * (2 * groups))


def test_rows_bytes_leases_and_what_is_ready_are_those_of_the_ledger(scraped: Scraped) -> None:
    partition = scraped.partition
    partition.put({"tokens": tokens(1)}, version=3)
    partition.put({"tokens": tokens(2), "reward": np.zeros(4, np.float32)}, version=5)
    partition.lease("train", 1)
    told = scraped.scrape()
    assert told["rows", "phase"] == 6
    assert told["row_bytes", "phase"] == partition.stats().nbytes == 6 * 20 + 4 * 4
    assert told["leases", "phase"] == 1
    assert (told["ready_groups", "score", "phase"], told["ready_groups", "train", "phase"]) == (3, 1)
    assert (told["ready_rows", "score", "phase"], told["ready_rows", "train", "phase"]) == (6, 2)
    assert told["ready_groups", "look", "phase"] == told["ready_rows", "look", "phase"] == 4, "it works by row"
    assert (told["group_staleness", "phase", "0"], told["group_staleness", "phase", "2"]) == (2, 1)
    soon(lambda: scraped.scrape()["oldest_group_age_seconds", "phase"] > 0)


def test_calls_that_wait_are_told_with_the_age_of_the_first(scraped: Scraped) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(scraped.services.plane().partition("phase").lease, "train", 1)
        soon(lambda: scraped.scrape()["waiting_calls", "train", "phase"] == 1)
        before = scraped.scrape()["longest_wait_seconds", "train", "phase"]
        assert 0 < before < scraped.scrape()["longest_wait_seconds", "train", "phase"]
        scraped.partition.put({"tokens": tokens(1), "reward": np.zeros(2, np.float32)})
        waiting.result(30)
    told = scraped.scrape()
    assert told["waiting_calls", "train", "phase"] == told["longest_wait_seconds", "train", "phase"] == 0


def test_a_unit_tells_how_full_it_is_and_what_waits_for_room(scraped: Scraped) -> None:
    partition = scraped.partition
    (unit,) = partition._units.addresses
    first = partition.put({"tokens": tokens(3)})
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(scraped.services.plane().partition("phase").put, {"tokens": tokens(2)})
        soon(lambda: scraped.scrape()["unit_waiting_puts", unit] == 1)
        told = scraped.scrape()
        assert (told["unit_up", unit], told["unit_rows", unit], told["unit_bytes", unit]) == (1, 6, 120)
        assert (told["unit_capacity_bytes", unit], told["unit_waiting_bytes", unit]) == (160, 80)
        partition.drop([int(first[0]) // 2])
        waits.result(30)
    assert scraped.scrape()["unit_waiting_puts", unit] == 0


def test_bytes_of_columns_are_told_by_the_way_they_went(scraped: Scraped) -> None:
    partition = scraped.partition
    (unit,) = partition._units.addresses
    partition.put({"tokens": tokens(1)})
    partition.take("score", 1)
    told = scraped.scrape()
    moved = {key[1:]: value for key, value in told.items() if key[0] == "column_bytes_total"}
    assert moved == {("tokens", "put", "phase", unit): 40, ("tokens", "sent", "phase", unit): 40}


def test_refused_messages_are_told_by_node_and_reason(scraped: Scraped) -> None:
    (unit,) = scraped.partition._units.addresses
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 10_000
        for address in (scraped.services.ledger, unit):
            peer.connect(address)
            peer.send_multipart([b"\x93\x00\x01"])
            peer.send_multipart(frames_of("lease_v2", None))
            peer.disconnect(address)
    for node in ("ledger", unit):
        soon(lambda node=node: scraped.scrape().get(("refused_messages_total", node, "malformed"), 0) >= 1)  # type: ignore[misc]
        assert scraped.scrape()["refused_messages_total", node, "unknown method"] >= 1


def test_calls_are_counted_by_method_and_by_how_long_they_took(scraped: Scraped) -> None:
    before = scraped.scrape().get(("call_seconds_count", "stats"), 0)
    for _ in range(5):
        scraped.partition.stats()
    told = scraped.scrape()
    assert told["call_seconds_count", "stats"] == told["call_seconds_bucket", "+Inf", "stats"] == before + 5
    assert 0 < told["call_seconds_sum", "stats"] < 5


@pytest.mark.parametrize(
    ("request_line", "status"), [(b"POST /metrics HTTP/1.1", "405"), (b"GET /secrets HTTP/1.1", "404"), (b"x", "405")]
)
def test_nothing_but_the_page_is_served(scraped: Scraped, request_line: bytes, status: str) -> None:
    assert fetch(scraped.path, request_line + b"\r\n\r\n").startswith(f"HTTP/1.1 {status} ")
    assert ("rows", "phase") in scraped.scrape()


@pytest.mark.parametrize("listen", ["", "9464", "host:", "host:port", "unix:", "host:70000"])
def test_what_is_no_place_to_listen_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        check_listen(listen)


async def test_a_port_that_is_taken_is_named() -> None:
    async def nothing() -> list[object]:
        return []

    first = MetricsPage("127.0.0.1:0", nothing)
    taken = await first.start()
    with pytest.raises(ConfigError, match=f"cannot be served at {taken}"):
        await MetricsPage(taken, nothing).start()
    await first.close()


async def test_a_socket_at_which_another_page_is_served_is_refused_and_one_that_was_left_behind_is_replaced(
    tmp_path: Path,
) -> None:
    async def nothing() -> list[object]:
        return []

    path = str(tmp_path / "metrics")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    first = MetricsPage(f"unix:{path}", nothing)
    await first.start()
    with pytest.raises(ConfigError, match="it is in use by another process") as refused:
        await MetricsPage(f"unix:{path}", nothing).start()
    assert "choose a port or path that is free" in refused.value.fix
    answer = await asyncio.to_thread(fetch, path, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert answer.startswith("HTTP/1.1 200 OK"), "the first is still served"
    await first.close()


async def test_who_asks_while_the_page_closes_is_let_go_without_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    asked = asyncio.Event()

    async def never() -> list[object]:
        asked.set()
        await asyncio.Event().wait()
        return []

    page = MetricsPage("127.0.0.1:0", never)
    host, _, port = (await page.start()).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    await asked.wait()
    await page.close()
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    assert not caplog.records
