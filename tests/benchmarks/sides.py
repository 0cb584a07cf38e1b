"""Who moves the bytes in the data plane's benchmark: headrace, a bare ZeroMQ store, TransferQueue. One class each."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import zmq
from bare_store import BareClient
from timing import latency, rate
from workloads import Workload, memcpy_rate

from headrace.contract import Storage
from headrace.dataplane import DataPlane, Partition, PartitionSpec
from headrace.dataplane.serve import serve_ledger, serve_unit
from headrace.wire import BlockingClient, Keys
from headrace_storage.memory import MemoryStorage
from headrace_storage.shared_memory import SharedMemoryStorage

CONSUMER = "train"


class Side(Protocol):
    """One round at a time."""

    def rates(self, load: Workload) -> dict[str, float]:
        """``put`` and ``get``: rows or MB a second."""
        ...

    def latency(self, load: Workload) -> float:
        """Median seconds from a put to the moment when a consumer that waits has the rows."""
        ...


# ---------------------------------------------------------------- headrace


def storage(shared: str) -> Storage:
    return SharedMemoryStorage(SharedMemoryStorage.Settings(directory=shared)) if shared else MemoryStorage(None)


def run_ledger(address: str, shared: str, keys: Keys | None, reached: Any) -> None:
    asyncio.run(serve_ledger(address, storage(shared), keys=keys, ready=reached.put))


def run_shard(address: str, shard: int, shards: int, keys: Keys | None, reached: Any) -> None:
    asyncio.run(serve_ledger(address, shard=shard, shards=shards, keys=keys, ready=reached.put))


def run_unit(address: str, shared: str, ledger: str | list[str], keys: Keys | None, reached: Any) -> None:
    asyncio.run(serve_unit(address, storage(shared), ledger=ledger, keys=keys, ready=reached.put))


class PlaneAddress(NamedTuple):
    """Where a data plane is: its ledger, or the shards of it."""

    ledger: str | list[str]
    keys: Keys | None

    def connect(self) -> DataPlane:
        """One thread's view."""
        return DataPlane(self.ledger, connect=lambda at: BlockingClient(at, keys=self.keys))


class Ours:
    """``process``: the first ledger's."""

    def __init__(self, at: PlaneAddress, process: int) -> None:
        self.at, self.process = at, process
        self._producer, self._consumer = self.connect(), self.connect()
        self._partitions: dict[str, Partition] = {}

    def rates(self, load: Workload) -> dict[str, float]:
        partition = self.partition(load)
        held: list[Any] = []

        def get() -> None:
            held.append(partition.take(CONSUMER, load.rows)[0])

        put = rate(load.amount, load.repeat, lambda: partition.put(load.columns))
        taken = rate(load.amount, load.repeat, get)
        for rows in held:
            partition.acknowledge(rows)
        return {"put": put, "get": taken}

    def latency(self, load: Workload) -> float:
        producer, consumer = self.partition(load), self._consumer.partition(load.name)

        def take() -> None:
            consumer.take(CONSUMER, load.rows)

        return latency(lambda: producer.put(load.columns), take, load.repeat)

    def connect(self) -> DataPlane:
        """Another thread's view."""
        return self.at.connect()

    def partition(self, load: Workload) -> Partition:
        """What takes the rows of a workload."""
        if load.name not in self._partitions:
            spec = PartitionSpec(load.name, dict(load.schema), {CONSUMER: tuple(load.schema)})
            self._partitions[load.name] = self._producer.create(spec)
        return self._partitions[load.name]


@contextmanager
def our_plane(folder: Path, *, units: int, keys: Keys | None, shared: str = "", shards: int = 0) -> Iterator[Ours]:
    """A ledger that is a storage unit too, or ``shards`` that are none, and further units in processes of their own.
    ``shared``: the directory of their shared memory, if it is to be shared."""
    spawn = multiprocessing.get_context("spawn")
    reached = spawn.Queue()

    def address(name: str) -> str:
        return "tcp://127.0.0.1:0" if keys else f"ipc://{folder}/{name}"

    processes = []

    def started(run: Callable[..., None], *arguments: object) -> str:
        """Where it is reached."""
        processes.append(spawn.Process(target=run, args=(*arguments, keys, reached), daemon=True))
        processes[-1].start()
        at: str = reached.get(timeout=60)
        return at

    try:
        ledgers = [started(run_shard, address(f"ledger-{shard}"), shard, shards) for shard in range(shards)]
        ledgers = ledgers or [started(run_ledger, address("ledger"), shared)]
        for number in range(units):
            started(run_unit, address(f"unit-{number}"), shared, ledgers)
        assert processes[0].pid is not None
        yield Ours(PlaneAddress(ledgers, keys), processes[0].pid)
    finally:
        for process in processes:
            process.kill()
            process.join()


# ---------------------------------------------------------------- the bare store


class Bare:
    """A store of ``bare_store.py`` by its address."""

    def __init__(self, address: str, keys: list[str]) -> None:
        self._producer, self._consumer = BareClient(address, keys), BareClient(address, keys)

    def rates(self, load: Workload) -> dict[str, float]:
        arrays = load.arrays
        return {
            "put": rate(load.amount, load.repeat, lambda: self._producer.put(arrays)),
            "get": rate(load.amount, load.repeat, self._producer.take),
        }

    def latency(self, load: Workload) -> float:
        return latency(lambda: self._producer.put(load.arrays), self._consumer.take, load.repeat)


@contextmanager
def bare_store(folder: Path, *, curve: bool) -> Iterator[Bare]:
    """A store in a process of its own."""
    address = "tcp://127.0.0.1:*" if curve else f"ipc://{folder}/bare"
    public, secret = (key.decode() for key in zmq.curve_keypair())
    keys = [secret, public] if curve else []
    script = Path(__file__).with_name("bare_store.py")
    command = [sys.executable, str(script), address, *keys]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reached = process.stdout.readline().strip()
        try:
            yield Bare(reached, keys)
        finally:
            process.kill()


# ---------------------------------------------------------------- TransferQueue


class TransferQueue:
    """``transfer_queue_side.py`` in a process, which reads columns from ``folder``."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder = process, folder
        self.version: str = self._answer()["version"]

    def rates(self, load: Workload) -> dict[str, float]:
        return self._round(load)

    def latency(self, load: Workload) -> float:
        return float(self._round(load)["latency"])

    def _round(self, load: Workload) -> dict[str, Any]:
        file = self._folder / f"{load.name}.npz"
        if not file.exists():
            np.savez(file, **load.arrays)
        assert self._process.stdin is not None
        request = {"name": load.name, "repeat": load.repeat, "amount": load.amount}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended ({self._process.wait()}); its stderr above says why")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def transfer_queue(python: Path, folder: Path) -> Iterator[TransferQueue]:
    """TransferQueue and its Ray in processes of that interpreter."""
    folder.mkdir()
    command = [str(python), str(Path(__file__).with_name("transfer_queue_side.py")), str(folder)]
    environment = os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray keeps one in the user's home
        "OMP_WAIT_POLICY": "passive",  # else its threads spin, which beside others' work costs it up to ten times
        "TQ_LOGGING_LEVEL": "ERROR",  # else every put and get logs how many cores there are
    }
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        yield TransferQueue(process, folder)


# ---------------------------------------------------------------- the limit that memory sets


class Memcpy:
    """One copy of a put's bytes in each direction."""

    def rates(self, load: Workload) -> dict[str, float]:
        return {"put": memcpy_rate(), "get": memcpy_rate()}

    def latency(self, load: Workload) -> float:
        return 0.0
