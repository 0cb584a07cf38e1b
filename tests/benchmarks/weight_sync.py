"""Weight transports next to the bare channels that they use: memcpy, a Unix socket, gloo.

    python tests/benchmarks/weight_sync.py [--json] [--megabytes 50,500] [--receivers 1,2] [--rounds 5]
                                           [--only shared_memory,zmq,collective,disk] [--delta]

The trainer's side is here, and every receiver is a process (``weight_sync_side.py``). In every round each side brings a
new version to all receivers, in turn, so that the machine's own speed is the same for all; the first round warms up.
Rates are MB of one version per second:

    publish   until the trainer may change its weights again
    fetch     from the word to fetch until the last receiver has every tensor and has verified its checksum
    together  both, one after the other

A bare channel verifies nothing and fills the same memory again: ``memcpy`` within one process, ``socket`` with a thread
per receiver, ``gloo`` by a broadcast of 8 MB buckets, ``file`` by one that is written and then read. ``KIND_to_BARE``
are medians of the rounds' ratios; what a bare channel does not publish is compared with all that it does. Every
transport hands arrays out that are then dropped; what an engine does with them is not measured.

``--delta``: how small the files of the transport ``disk`` are, for versions of a short run of the demo.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kept_weights
import numpy as np
from demo import demo_job, progress, run_job
from timing import median_ratio
from weight_sync_side import BUCKET, Files, Gloo, Layers, Receivers, Sockets

from headrace.contract import TransportContext, WeightTransport
from headrace.registry import load

TRANSPORTS = ("shared_memory", "zmq", "collective", "disk")
BARE = {"shared_memory": "memcpy", "zmq": "socket", "collective": "gloo", "disk": "file"}
"""Transport → the bare channel that its limit is."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {"disk": {"full_every": 1}}
"""Every version whole: what differs between versions is measured by itself."""

Seconds = dict[str, float]


class Ours:
    """A transport's publisher here, and its receivers there."""

    def __init__(self, name: str, folder: Path, receivers: Receivers, source: Layers) -> None:
        cls = load("weight_transport", name)
        assert issubclass(cls, WeightTransport)
        self._publisher = cls(cls.Settings(**SETTINGS.get(name, {}))).publisher(
            TransportContext(directory=str(folder), name=name)
        )
        self._name, self._receivers, self._source = name, receivers, source
        self._version = 0
        receivers.all(f"open {name} {self._publisher.address()}")

    def seconds(self) -> Seconds:
        """One version, and the one before is retired."""
        self._version += 1
        publish = timed(lambda: self._publisher.publish(self._version, self._source))
        fetch = timed(lambda: self._receivers.all(f"fetch {self._name} {self._version}"))
        self._publisher.retire(self._version - 1)
        return {"publish": publish, "fetch": fetch, "together": publish + fetch}

    def close(self) -> None:
        self._publisher.close()


class Memcpy:
    """Within this process, into memory that is there already."""

    def __init__(self, source: Layers) -> None:
        self._source, self._target = source.flat, np.zeros_like(source.flat)

    def seconds(self) -> Seconds:
        return {"fetch": timed(lambda: np.copyto(self._target, self._source))}

    def close(self) -> None:
        """Nothing is open."""


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(megabytes: int, count: int, *, names: list[str], rounds: int) -> dict[str, Any]:
    """Rates and ratios of every side."""
    source = Layers(megabytes)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-")))
        receivers = stack.enter_context(Receivers(count, folder, source.flat.nbytes))
        sides: dict[str, Any] = {name: Ours(name, folder, receivers, source) for name in names}
        sides["memcpy"] = Memcpy(source)
        sides["socket"] = Sockets(source, receivers, timed)
        sides["gloo"] = Gloo(source, receivers, timed)
        sides["file"] = Files(source, receivers, timed)
        kept: dict[str, list[Seconds]] = {name: [] for name in sides}
        for _ in range(rounds + 1):
            for name, side in sides.items():
                kept[name].append(side.seconds())
        for side in sides.values():
            side.close()
    return rates(source.flat.nbytes / 1e6, {name: done[1:] for name, done in kept.items()})


def rates(megabytes: float, kept: Mapping[str, list[Seconds]]) -> dict[str, Any]:
    """Medians in MB a second, and of the rounds' ratios to the bare channels."""
    result: dict[str, Any] = {}
    for name, done in kept.items():
        columns = {kind: [megabytes / seconds[kind] for seconds in done] for kind in done[0]}
        result[name] = {f"{kind}_mb_s": round(statistics.median(values)) for kind, values in columns.items()}
        if name in BARE:
            bare = BARE[name]
            for kind in ("fetch", "together"):
                limit = [megabytes / seconds.get(kind, seconds["fetch"]) for seconds in kept[bare]]
                result[name][f"{kind}_to_{bare}"] = round(median_ratio(columns[kind], limit), 2)
    return result


def delta(folder: Path) -> dict[str, Any]:
    """Of a short run of the demo: a warm-up of 60 batches, 12 of GRPO, whose versions are compared."""
    job = demo_job(0)
    job["evaluation"], job["checkpoint"] = {"every": 0}, {"every": 0}
    del job["phase"][0]["until"]
    job["phase"][0]["steps"], job["phase"][1]["steps"] = 60, 12
    (folder / "weights").mkdir()
    job["weights"] = {"use": f"{Path(kept_weights.__file__)}:Kept", "path": str(folder / "weights")}
    run_job(job, folder / "run")
    return kept_weights.shares(kept_weights.versions(folder / "weights")[-13:])


def show(title: str, result: Mapping[str, Mapping[str, Any]]) -> None:
    """To stderr, a line for each side."""
    progress(title)
    for name, figures in result.items():
        progress(f"  {name:14} " + ", ".join(f"{kind} {value:g}" for kind, value in figures.items()))


def main() -> int:
    """Print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--megabytes", default="50,500", help="sizes of a version")
    parser.add_argument("--receivers", default="1,2", help="numbers of receivers")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--only", default=",".join(TRANSPORTS), help="transports")
    parser.add_argument("--delta", action="store_true", help="what differs between versions of the demo")
    options = parser.parse_args()
    result: dict[str, Any] = {"rounds": options.rounds, "bucket_bytes": BUCKET}
    for megabytes in map(int, options.megabytes.split(",")):
        for count in map(int, options.receivers.split(",")):
            title = f"{megabytes} MB, {count} receiver{'s' * (count > 1)}"
            found = measure(megabytes, count, names=options.only.split(","), rounds=options.rounds)
            result[title] = found
            show(title, found)
    if options.delta:
        with tempfile.TemporaryDirectory() as folder:
            result["delta"] = delta(Path(folder))
            show("delta", result["delta"])
    if options.json:
        print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
