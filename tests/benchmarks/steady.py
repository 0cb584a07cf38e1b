"""What must stay as it is while the data plane fills, runs and is shared: the ledger alone, or a plane in processes."""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
from sides import CONSUMER, Ours, PlaneAddress
from timing import rate
from workloads import Workload

from headrace.dataplane import ColumnSchema, Partition, PartitionSpec
from headrace.flow.ledger import Ledger

NUMBER = {"number": ColumnSchema("int64")}
PAGE = 4096


def growth(outstanding: int) -> tuple[float, float]:
    """Median seconds of a lease of 64 rows beside ``outstanding`` others, and bytes of memory per row."""
    tracemalloc.start()
    ledger = Ledger(group_size=1, columns=("a", "b", "c"), consumers={"x": ("a",), "y": ("a", "b", "c")})
    for start in range(0, outstanding, 1000):
        first = ledger.open_many(1000, start // 1000 % 3)
        ledger.write(np.arange(first, first + 1000), ("a", "b", "c"), nbytes=132, tokens=10, unit=1)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    seconds = []
    for _ in range(500):
        started = time.perf_counter()
        lease = ledger.lease("x", 64, deadline=1.0)
        assert lease is not None
        ledger.contents(lease)
        seconds.append(time.perf_counter() - started)
        ledger.release(lease.lease)
    return statistics.median(seconds), used / outstanding


def claims(plane: Ours, outstanding: int = 100_000, each: int = 5000) -> float:
    """Leases of one row a second by two client processes, over the wire, with ``outstanding`` rows there all the
    while."""
    partition = _numbers(plane, "claims")
    for _ in range(outstanding // 1000):
        partition.put({"number": np.arange(1000)})
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(3)
    claimers = [spawn.Process(target=_claim, args=(plane.at, each, start), daemon=True) for _ in range(2)]
    for claimer in claimers:
        claimer.start()
    start.wait(60)
    return rate(2 * each, 1, lambda: [claimer.join() for claimer in claimers])


def _claim(plane: PlaneAddress, each: int, start: Barrier) -> None:
    partition = plane.connect().partition("claims")
    partition.release(partition.lease(CONSUMER, 1))  # connected by then
    start.wait()
    for _ in range(each):
        partition.lease(CONSUMER, 1)


def shares(plane: Ours, seconds: float = 4.0) -> float:
    """Rows that a consumer gets, to those of another that takes twice as long for each; 2 is fair (AFL-10)."""
    _numbers(plane, "shares").put({"number": np.arange(20_000)})
    taken = {0.02: 0, 0.04: 0}
    until = time.monotonic() + seconds

    def consume(work: float) -> None:
        partition = plane.connect().partition("shares")
        while time.monotonic() < until:
            partition.acknowledge(partition.lease(CONSUMER, 8))
            time.sleep(work)  # what a consumer does with its rows
            taken[work] += 8

    _together([partial(consume, work) for work in taken])
    return taken[0.02] / taken[0.04]


def cycles(plane: Ours, load: Workload, count: int = 2000) -> float:
    """Bytes by which the memory of the serving process grows per cycle of put, take and acknowledge: the slope of its
    resident set over the second half of ``count`` cycles."""
    partition, resident = plane.partition(load), []
    for _ in range(count):
        partition.put(load.columns)
        rows, _ = partition.take(CONSUMER, load.rows)
        partition.acknowledge(rows)
        resident.append(PAGE * int(Path(f"/proc/{plane.process}/statm").read_text().split()[1]))
    half = np.array(resident[count // 2 :])
    return float(np.polyfit(np.arange(len(half)), half, 1)[0])


def _together(work: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=part) for part in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _numbers(plane: Ours, name: str) -> Partition:
    return plane.connect().create(PartitionSpec(name, NUMBER, {CONSUMER: tuple(NUMBER)}))
