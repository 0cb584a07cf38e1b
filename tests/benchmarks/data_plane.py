"""The data plane next to a bare ZeroMQ store, which is the physical limit, and to memcpy.

    python tests/benchmarks/data_plane.py [--json] [--rounds 5] [--units 0] [--curve] [--only single,latency]
                                          [--transfer-queue build/transfer-queue/bin/python]

One process serves here, the ledger that is a storage unit too (``--units 2``: and two further units), and one there
(``bare_store.py``, which says what it leaves out). All sides do the same bytes, in turn, ``--rounds`` times; what
counts is the median of the rounds' ratios, since the machine's own speed changes meanwhile. Workloads:

    single       1 row of 132 bytes: put; lease and get          rows a second
    batch        64 such rows at once                            rows a second
    ragged       256 rows of log-normal length, tokens and log-probs    MB a second
    text         1024 rows of 2048 tokens and log-probs                 MB a second
    megabyte     128 rows of 1 MB                                       MB a second
    shared       megabyte, with units whose memory is shared, next to a memcpy of the same bytes; get gives views
    latency      put until a consumer that waits in another thread has the row   seconds, p50
    shards       batch, with two ledgers next to one; two units in either case

A lease here is acknowledged afterwards, outside the measured time. ``growth`` is of the ledger alone, in this process:
a lease of 64 rows with 1,000 and with 1,000,000 rows outstanding, and its memory per row. ``steady`` is of a plane of
its own: ``slope``, bytes by which the serving process grows per cycle of put, take and acknowledge, of 2,000;
``claims``, leases of one row a second by two client processes with 100,000 rows outstanding; ``shares``, rows of a
consumer that is twice as fast to those of the other.

``make transfer-queue`` sets up an interpreter for ``--transfer-queue``, without which TransferQueue is left out. It too
has two storage units, over tcp, which is all that it offers; ``transfer_queue_side.py`` says how it is used.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from demo import progress, use_two_cores
from sides import Memcpy, Side, bare_store, our_plane, transfer_queue
from steady import claims, cycles, growth, shares
from timing import median_ratio
from workloads import memcpy_rate, waiting, workloads

from headrace.wire import Keys


def compare(measured: Callable[[Side], dict[str, float]], sides: Mapping[str, Side], rounds: int) -> dict[str, Any]:
    """Medians of every side, one round of each in turn, and of the rounds' ratios of ours to the others."""
    kept: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, side in sides.items():
            kept[name].append(measured(side))
    columns = {name: transposed(done[1:]) for name, done in kept.items()}  # the first warms up
    result: dict[str, Any] = {
        name: {kind: statistics.median(values) for kind, values in column.items()} for name, column in columns.items()
    }
    for name in sides:
        if name != "ours":
            for kind, values in columns["ours"].items():
                result[f"{kind}_to_{name}"] = median_ratio(values, columns[name][kind])
    return result


def transposed(rounds: list[dict[str, float]]) -> dict[str, list[float]]:
    return {kind: [done[kind] for done in rounds] for kind in rounds[0]}


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    keys = Keys.generate() if options.curve else None
    result: dict[str, Any] = {
        "rounds": options.rounds,
        "transport": "tcp" if options.curve else "ipc",
        "curve": options.curve,
    }
    with ExitStack() as stack:
        sides: dict[str, Side] = {
            "ours": stack.enter_context(our_plane(folder, units=options.units, keys=keys)),
            "bare": stack.enter_context(bare_store(folder, curve=options.curve)),
        }
        if options.transfer_queue:
            sides["transfer_queue"] = stack.enter_context(transfer_queue(options.transfer_queue, folder / "queue"))
        for load in workloads():
            if load.name in options.only:
                result[load.name] = compare(lambda side, load=load: side.rates(load), sides, options.rounds)
                show(load.name, result[load.name])
        if "latency" in options.only:
            load = waiting()
            result[load.name] = compare(lambda side: {"seconds": side.latency(load)}, sides, options.rounds)
            show(load.name, result[load.name])
    if "shared" in options.only:
        load = next(load for load in workloads() if load.name == "megabyte")
        (folder / "shared").mkdir(0o700)
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
            our_plane(folder / "shared", units=options.units, keys=keys, shared=memory) as side,
        ):
            result["shared"] = compare(
                lambda side: side.rates(load), {"ours": side, "memcpy": Memcpy()}, options.rounds
            )
        show("shared", result["shared"])
    if "shards" in options.only:
        load = next(load for load in workloads() if load.name == "batch")
        with ExitStack() as stack:
            planes: dict[str, Side] = {}
            for shards, name in ((2, "ours"), (1, "one_ledger")):
                place = folder / name
                place.mkdir(0o700)
                planes[name] = stack.enter_context(our_plane(place, units=2, keys=keys, shards=shards))
            result["shards"] = compare(lambda side: side.rates(load), planes, options.rounds)
        show("shards", result["shards"])
    result["memcpy"] = memcpy_rate()
    if "growth" in options.only:
        (small, _), (large, nbytes) = growth(1_000), growth(1_000_000)
        result["growth"] = {"lease_1k": small, "lease_1m": large, "ratio": large / small, "bytes_per_row": nbytes}
    if "steady" in options.only:
        (folder / "steady").mkdir(0o700)
        with our_plane(folder / "steady", units=options.units, keys=keys) as side:
            result["steady"] = {
                "slope": cycles(side, next(load for load in workloads() if load.name == "batch")),
                "claims": claims(side),
                "shares": shares(side),
            }
        progress(", ".join(f"{name} {value:.2f}" for name, value in result["steady"].items()))
    return result


def show(name: str, compared: Mapping[str, Any]) -> None:
    ratios = [f"{key.replace('_', ' ')} {value:.2f}" for key, value in compared.items() if "_to_" in key]
    progress(f"{name}: {', '.join(ratios)}")


def main() -> int:
    """Print the result."""
    names = [*(load.name for load in workloads()), "shared", "latency", "shards", "growth", "steady"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--units", type=int, default=0, help="storage units beside the ledger's own")
    parser.add_argument(
        "--curve", action="store_true", help="over tcp, encrypted: a run does not talk over tcp otherwise"
    )
    parser.add_argument("--transfer-queue", type=Path, metavar="PYTHON", help="interpreter that has transfer_queue")
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
