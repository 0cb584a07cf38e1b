"""The data plane next to a bare ZeroMQ store, which is the physical limit, and to memcpy.

    python tests/benchmarks/data_plane.py [--json] [--rounds 5] [--tcp] [--curve] [--only single,latency]

Three processes serve here: the ledger and two storage units; one serves there (``bare_store.py``, which says what it
leaves out). Both sides do the same bytes, in turn, ``--rounds`` times; what counts is the median of the rounds'
ratios, since the machine's own speed changes meanwhile. Workloads:

    single       1 row of 132 bytes: put; lease and get          rows a second
    batch        64 such rows at once                            rows a second
    ragged       256 rows of log-normal length, tokens and log-probs    MB a second
    text         1024 rows of 2048 tokens and log-probs                 MB a second
    megabyte     128 rows of 1 MB                                       MB a second
    latency      put until a consumer that waits in another process has the row    seconds, p50

A lease here is acknowledged afterwards, outside the measured time. ``growth`` is of the ledger alone, in this process:
a lease of 64 rows with 1,000 and with 1,000,000 rows outstanding, and its memory per row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from bare_store import BareClient
from demo import progress, use_two_cores
from workloads import Rates, Workload, latency, median_ratio, memcpy_rate, rate, workloads

from headrace.dataplane import DataPlane, Partition, PartitionSpec
from headrace.dataplane.serve import serve_ledger, serve_unit
from headrace.flow.ledger import Ledger
from headrace.wire import BlockingClient, Keys
from headrace_storage.memory import MemoryStorage

UNITS = 2
CONSUMER = "train"


# ---------------------------------------------------------------- the two sides


def run_ledger(address: str, keys: Keys | None, reached: Any) -> None:
    asyncio.run(serve_ledger(address, keys=keys, ready=reached.put))


def run_unit(address: str, ledger: str, keys: Keys | None, reached: Any) -> None:
    asyncio.run(serve_unit(address, MemoryStorage(None), ledger=ledger, keys=keys, ready=reached.put))


@contextmanager
def our_plane(folder: Path, *, tcp: bool, keys: Keys | None) -> Iterator[Callable[[], DataPlane]]:
    """Makes clients of a data plane of its own processes."""
    spawn = multiprocessing.get_context("spawn")
    reached = spawn.Queue()

    def address(name: str) -> str:
        return "tcp://127.0.0.1:0" if tcp else f"ipc://{folder}/{name}"

    processes = [spawn.Process(target=run_ledger, args=(address("ledger"), keys, reached), daemon=True)]
    processes[0].start()
    ledger = reached.get()
    for number in range(UNITS):
        arguments = (address(f"unit-{number}"), ledger, keys, reached)
        processes.append(spawn.Process(target=run_unit, args=arguments, daemon=True))
        processes[-1].start()
        reached.get()
    try:
        yield lambda: DataPlane(ledger, connect=lambda at: BlockingClient(at, keys=keys))
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextmanager
def bare_store(folder: Path, *, tcp: bool, curve: bool) -> Iterator[Callable[[], BareClient]]:
    """Makes clients of a bare store."""
    address = "tcp://127.0.0.1:*" if tcp else f"ipc://{folder}/bare"
    public, secret = (key.decode() for key in zmq.curve_keypair())
    keys = [secret, public] if curve else []
    script = Path(__file__).with_name("bare_store.py")
    command = [sys.executable, str(script), address, *keys]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reached = process.stdout.readline().strip()
        try:
            yield lambda: BareClient(reached, keys)
        finally:
            process.kill()


def measure_ours(partition: Partition, load: Workload, rates: Rates) -> None:
    groups = len(next(iter(load.columns.values())))
    held: list[Any] = []

    def get() -> None:
        rows = partition.lease(CONSUMER, groups)
        partition.get(rows)
        held.append(rows)

    rates.put.append(rate(load.amount, load.repeat, lambda: partition.put(load.columns)))
    rates.get.append(rate(load.amount, load.repeat, get))
    for rows in held:
        partition.acknowledge(rows)


def measure_bare(client: BareClient, load: Workload, rates: Rates) -> None:
    arrays = load.arrays
    rates.put.append(rate(load.amount, load.repeat, lambda: client.put(arrays)))
    rates.get.append(rate(load.amount, load.repeat, client.take))


# ---------------------------------------------------------------- the ledger alone


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
        ledger.units_of(ledger.rows_of(lease.groups))
        seconds.append(time.perf_counter() - started)
        ledger.release(lease.lease)
    return statistics.median(seconds), used / outstanding


# ---------------------------------------------------------------- the whole


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    keys = Keys.generate() if options.curve else None
    tcp = options.tcp or options.curve
    result: dict[str, Any] = {"rounds": options.rounds, "transport": "tcp" if tcp else "ipc", "curve": options.curve}
    with ExitStack() as stack:
        ours = stack.enter_context(our_plane(folder, tcp=tcp, keys=keys))
        bare = stack.enter_context(bare_store(folder, tcp=tcp, curve=options.curve))
        plane, store = ours(), bare()
        for load in workloads():
            if load.name not in options.only:
                continue
            spec = PartitionSpec(load.name, dict(load.schema), {CONSUMER: tuple(load.schema)})
            partition, mine, theirs = plane.create(spec), Rates(), Rates()
            for _ in range(options.rounds + 1):  # the first warms up
                measure_ours(partition, load, mine)
                measure_bare(store, load, theirs)
            for rates in (mine, theirs):
                del rates.put[0], rates.get[0]
            result[load.name] = {
                "ours": {name: statistics.median(values) for name, values in asdict(mine).items()},
                "bare": {name: statistics.median(values) for name, values in asdict(theirs).items()},
                "put_to_bare": median_ratio(mine.put, theirs.put),
                "get_to_bare": median_ratio(mine.get, theirs.get),
            }
            ratios = result[load.name]
            progress(f"{load.name}: put {ratios['put_to_bare']:.2f}, get {ratios['get_to_bare']:.2f} of bare")
        if "latency" in options.only:
            result["latency"] = measure_latency(ours, bare, options.rounds)
    result["memcpy"] = memcpy_rate()
    if "growth" in options.only:
        (small, _), (large, nbytes) = growth(1_000), growth(1_000_000)
        result["growth"] = {"lease_1k": small, "lease_1m": large, "ratio": large / small, "bytes_per_row": nbytes}
    return result


def measure_latency(ours: Callable[[], DataPlane], bare: Callable[[], BareClient], rounds: int) -> dict[str, float]:
    load = workloads()[0]
    spec = PartitionSpec("latency", dict(load.schema), {CONSUMER: tuple(load.schema)})
    producer, consumer = ours().create(spec), ours().partition("latency")
    giver, taker = bare(), bare()
    mine, theirs = [], []
    for _ in range(rounds):
        mine.append(latency(lambda: producer.put(load.columns), lambda: consumer.get(consumer.lease(CONSUMER, 1)), 100))
        theirs.append(latency(lambda: giver.put(load.arrays), taker.take, 100))
    return {
        "ours": statistics.median(mine),
        "bare": statistics.median(theirs),
        "to_bare": median_ratio(mine, theirs),
    }


def main() -> int:
    """Print the result."""
    names = [*(load.name for load in workloads()), "latency", "growth"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--tcp", action="store_true", help="over tcp, not ipc")
    parser.add_argument("--curve", action="store_true", help="over tcp, encrypted")
    parser.add_argument("--only", type=lambda text: text.split(","), default=names, help=",".join(names))
    options = parser.parse_args()
    use_two_cores()
    folder = Path(tempfile.mkdtemp())
    try:
        result = measure(options, folder)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
