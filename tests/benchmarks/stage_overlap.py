"""AFL-9: how near three stages that stream come to the slowest of them, by the number of micro-batches.

    python tests/benchmarks/stage_overlap.py [--json] [--plot FILE] [--rounds 3] [--seconds 1.2,0.9,1.5]

Four processes on a data plane: its ledger, which is the storage unit too, and three stages. *generate* puts the tokens
of a batch, *reference* leases rows, puts log-probs of them, *train* leases whole groups. A batch is 256 rows in groups
of 8, cut into ``m`` micro-batches; a stage takes its seconds for a batch, a ``m``-th of them for a micro-batch. What
stands for a stage's work is a **wait**, not computing: on two cores three stages that compute could not overlap,
whatever the data plane does. So every second beyond the waits is the data plane's and the machine's.

With m = 1 the makespan is the sum of the stages. A pipeline without any cost takes
``sum / m + (m - 1) * slowest / m``, which goes towards the slowest stage; that is ``ideal`` below. Seconds are from the
start of *generate* to the end of *train*, the median of the rounds; numbers of micro-batches alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np

from headrace.contract import Ragged
from headrace.dataplane import ColumnSchema, DataPlane, PartitionSpec
from headrace.dataplane.serve import serve_ledger
from headrace.wire import ipc_address
from headrace_storage.memory import MemoryStorage

ROWS, GROUP, TOKENS = 256, 8, 500
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
STAGES = ("generate", "reference", "train")
WAIT = 60.0


def spec(name: str) -> PartitionSpec:
    return PartitionSpec(
        name,
        {"tokens": ColumnSchema("int32", ragged=True), "logprobs": ColumnSchema("float32", ragged=True)},
        {"reference": ("tokens",), "train": ("tokens", "logprobs")},
        GROUP,
        "tokens",
        {"reference": ("logprobs",)},
        ("reference",),
    )


def serve(address: str) -> None:
    asyncio.run(serve_ledger(address, MemoryStorage(None), ready=lambda reached: None))


def generate(plane: DataPlane, name: str, parts: int, seconds: float) -> None:
    partition = plane.partition(name)
    count = ROWS // parts
    lengths = np.full(count, TOKENS)
    tokens = Ragged(values=np.zeros(count * TOKENS, np.int32), offsets=np.concatenate([[0], np.cumsum(lengths)]))
    for _ in range(parts):
        time.sleep(seconds / parts)  # the stage's work: a wait, since two cores could not overlap three of it
        partition.put({"tokens": tokens})


def reference(plane: DataPlane, name: str, parts: int, seconds: float) -> None:
    partition = plane.partition(name)
    for _ in range(parts):
        rows, batch = partition.take("reference", ROWS // parts, deadline=WAIT)
        time.sleep(seconds / parts)  # the stage's work: a wait, since two cores could not overlap three of it
        tokens = batch.ragged("tokens")
        logprobs = tokens.like(np.zeros(len(tokens.values), np.float32))
        partition.put({"logprobs": logprobs}, rows=rows.rows)
        partition.acknowledge(rows)


def train(plane: DataPlane, name: str, parts: int, seconds: float) -> None:
    partition = plane.partition(name)
    for _ in range(parts):
        rows, _ = partition.take("train", ROWS // GROUP // parts, deadline=WAIT)
        time.sleep(seconds / parts)  # the stage's work: a wait, since two cores could not overlap three of it
        partition.acknowledge(rows)


def stage(number: int, address: str, runs: list[tuple[str, int]], seconds: float, gate: Barrier, told: Any) -> None:
    """Every run in turn; all stages begin it together. ``told`` hears when the stage began and ended it."""
    plane = DataPlane(address)
    work = (generate, reference, train)[number]
    for name, parts in runs:
        gate.wait(WAIT)
        began = time.monotonic()
        work(plane, name, parts, seconds)
        told.put((name, STAGES[number], began, time.monotonic()))
    plane.close()


def measured(folder: str, seconds: list[float], rounds: int) -> dict[int, list[float]]:
    """Makespans by number of micro-batches."""
    context = multiprocessing.get_context("spawn")
    address = ipc_address(folder, "ledger")
    ledger = context.Process(target=serve, args=(address,))
    ledger.start()
    runs = [(f"{number}-{parts}", parts) for number in range(rounds) for parts in MICRO_BATCHES]
    plane = DataPlane(address)
    for name, _ in runs:
        plane.create(spec(name))
    gate, told = context.Barrier(len(STAGES)), context.Queue()
    stages = [
        context.Process(target=stage, args=(number, address, runs, seconds[number], gate, told))
        for number in range(len(STAGES))
    ]
    for process in stages:
        process.start()
    found = [told.get(timeout=600) for _ in range(len(runs) * len(STAGES))]
    for process in stages:
        process.join()
    plane.close()
    ledger.terminate()
    ledger.join()
    spans: dict[int, list[float]] = {parts: [] for parts in MICRO_BATCHES}
    for name, parts in runs:
        of_run = [(began, ended) for run, _, began, ended in found if run == name]
        spans[parts].append(max(ended for _, ended in of_run) - min(began for began, _ in of_run))
    return spans


def ideal(seconds: list[float], parts: int) -> float:
    """Of a pipeline in which nothing but the stages takes time."""
    return (sum(seconds) + (parts - 1) * max(seconds)) / parts


def plot(file: Path, result: dict[str, Any]) -> None:
    """One page with the curve."""
    import plotly.graph_objects as figures  # an extra of the report

    counts = [int(parts) for parts in result["makespan"]]
    drawn = figures.Figure()
    for name in ("makespan", "ideal"):
        drawn.add_scatter(x=counts, y=list(result[name].values()), name=name, mode="lines+markers")
    for name in ("slowest", "sum"):
        drawn.add_hline(y=result[name], line_dash="dot", annotation_text=f"{name} of the stages")
    drawn.update_layout(
        xaxis={"title": "micro-batches", "type": "log", "tickvals": counts},
        yaxis={"title": "seconds per batch", "rangemode": "tozero"},
    )
    drawn.write_html(file)


def main() -> int:
    """Print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, help="write a page with the curve")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", default="1.2,0.9,1.5", help="of each stage for a batch, without overlap")
    options = parser.parse_args()
    seconds = [float(part) for part in options.seconds.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        spans = measured(folder, seconds, options.rounds)
    makespan = {parts: statistics.median(found) for parts, found in spans.items()}
    result: dict[str, Any] = {
        "stages": dict(zip(STAGES, seconds, strict=True)),
        "work": "waits",
        "sum": sum(seconds),
        "slowest": max(seconds),
        "makespan": makespan,
        "ideal": {parts: ideal(seconds, parts) for parts in MICRO_BATCHES},
        "makespan_to_sum_at_1": makespan[1] / sum(seconds),
        "makespan_to_slowest": {parts: span / max(seconds) for parts, span in makespan.items()},
        "rounds": options.rounds,
    }
    if options.plot:
        plot(options.plot, result)
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
