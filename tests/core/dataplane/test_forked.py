"""What a process inherits through fork of a data plane that another talks to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.dataplane import ColumnSchema, DataPlane, Partition, PartitionSpec, Stream
from headrace.dataplane.shared import SHARED_BYTES
from headrace.wire import BlockingClient
from headrace_storage.shared_memory import SharedMemoryStorage
from support.data_plane import Services
from support.forks import Fork

SPEC = PartitionSpec("phase", {"image": ColumnSchema("uint8", (SHARED_BYTES,))}, {"train": ("image",)})


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    sockets = tmp_path / "sockets"
    sockets.mkdir(0o700)
    table = SharedMemoryStorage.Settings(directory=str(tmp_path), segment_bytes=1 << 20)
    running = Services(sockets, own=SharedMemoryStorage(table))
    yield running
    running.close()


def put(partition: Partition) -> list[int]:
    rows: list[int] = partition.put({"image": np.zeros((1, SHARED_BYTES), np.uint8)}).tolist()
    return rows


def test_a_data_plane_inherited_through_fork_is_refused_at_once_and_stays_its_makers(
    services: Services, tmp_path: Path
) -> None:
    plane = services.plane()
    partition = plane.create(SPEC)
    put(partition)
    held = partition.lease("train", 1)
    for work in (
        lambda: put(partition),
        lambda: partition.get(held),
        lambda: partition.acknowledge(held),
        lambda: plane.partition("phase"),
    ):
        said = Fork(work).said()
        assert said.startswith("WireError: the client of ")
        assert f"was made by process {os.getpid()}, from which this one was forked" in said
        assert "fix:  make another in this process" in said
    assert Fork(plane.close).said() == "returned None"
    assert list(tmp_path.rglob("client-*")), "the unit still takes values that its maker writes to shared memory"
    rows = put(partition)
    assert partition.get(held).dense("image").sum() == 0
    partition.acknowledge(held)
    assert partition.lease("train", 1).rows.tolist() == rows


def test_a_process_that_was_forked_makes_a_data_plane_of_its_own(services: Services) -> None:
    put(services.plane().create(SPEC))
    said = Fork(lambda: DataPlane(services.ledger).partition("phase").lease("train", 1).tokens.tolist()).said()
    assert said == "returned [0]"


def test_a_stream_inherited_through_fork_is_refused_at_once_and_stays_its_makers(services: Services) -> None:
    partition = services.plane().create(SPEC)
    put(partition)
    with Stream(lambda: services.plane().partition("phase"), "train", step_groups=1) as stream:
        said = Fork(lambda: next(stream.step())).said()
        assert said.startswith("WireError: the stream of train was made by process ")
        with stream._lock:  # as its thread may at any time
            assert Fork(stream.close).said() == "returned None"
        assert len(next(stream.step())) == 1
        stream.acknowledge()
    assert partition.stats().rows == 0


def test_a_client_that_nobody_ever_answered_can_be_closed_in_a_fork(tmp_path: Path) -> None:
    client = BlockingClient(f"ipc://{tmp_path}/nobody")
    client.send("describe", deadline=30)
    assert Fork(client.close).said() == "returned None"
    client.close()
