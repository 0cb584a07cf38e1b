"""Weights to another process, rows in and out of storage: `python tests/core/plugins_transport/bench_transport.py`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np

from headrace.contract import Array, Batch, Column, NoSettings, Ragged, TransportContext, WeightSource
from headrace_storage.memory import MemoryStorage
from headrace_weights.zmq import ZmqSettings, ZmqTransport


class Layers(WeightSource):
    """``megabytes`` of float32 in tensors of 4 MB."""

    def __init__(self, megabytes: int) -> None:
        self._tensors = [np.full((1024, 1024), i, np.float32) for i in range(megabytes // 4)]

    def tensors(self) -> Iterator[tuple[str, Array]]:
        for i, tensor in enumerate(self._tensors):
            yield f"layer.{i}", tensor


def seconds(run: Callable[[], object], *, rounds: int = 5) -> str:
    """Best and median, in ms."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return f"{min(times) * 1e3:9.2f} / {statistics.median(times) * 1e3:9.2f} ms"


def weights(megabytes: int) -> None:
    """The publisher lives in the other process."""
    directory = tempfile.mkdtemp()
    command = [sys.executable, __file__, directory, str(megabytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        print(process.stdout.readline().rstrip())
        address = process.stdout.readline().strip()
        transport = ZmqTransport(ZmqSettings())
        receiver = transport.receiver(TransportContext(directory=directory, name="receiver"), address)
        manifest = receiver.manifest(0, deadline=10)

        def fetch() -> None:
            for _ in receiver.fetch(manifest, deadline=10):
                pass

        print(f"fetch   {megabytes:4} MB", seconds(fetch))
        receiver.close()
        process.communicate()


def serve(directory: str, megabytes: int) -> None:
    """Until stdin ends."""
    publisher = ZmqTransport(ZmqSettings()).publisher(TransportContext(directory=directory, name="trainer"))
    source = Layers(megabytes)
    versions = iter(range(100))

    def publish() -> None:
        version = next(versions)
        publisher.publish(version, source)
        publisher.retire(version - 1)

    print(f"publish {megabytes:4} MB", seconds(publish), flush=True)
    publisher.publish(99, source)
    publisher.retire(next(versions) - 1)
    publisher.publish(0, source)
    print(publisher.address(), flush=True)
    sys.stdin.read()
    publisher.close()


def storage(rows: int, length: int) -> None:
    """Two ragged columns and three dense ones."""
    memory = MemoryStorage(NoSettings())
    values, offsets = np.zeros(rows * length, np.int32), np.arange(rows + 1) * length
    columns: dict[str, Column] = {
        "tokens": Ragged(values, offsets),
        "behaviour_logprobs": Ragged(values.astype(np.float32), offsets),
        "reward": np.zeros(rows, np.float32),
        "group": np.zeros(rows, np.int64),
        "version": np.zeros(rows, np.int64),
    }
    order = list(range(rows))
    batch = Batch(rows=np.arange(rows), columns=columns)
    print(f"put     {rows} rows of {length}", seconds(lambda: memory.put(batch), rounds=20))
    print(f"get     {rows} rows of {length}", seconds(lambda: memory.get(order, list(columns)), rounds=20))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(sys.argv[1], int(sys.argv[2]))
    else:
        weights(100)
        storage(256, 40)
        storage(1024, 2048)
