"""The receivers of the weight benchmark, each a process, and the bare channels to them.

    python tests/benchmarks/weight_sync_side.py RANK WORLD FOLDER NBYTES

A receiver reads one command a line and answers ``done`` when it has done it. ``open NAME ADDRESS`` and ``fetch NAME
VERSION`` are of a transport; ``socket`` and ``gloo`` bring the version's bytes over a channel that stays open, and
``file PATH`` reads them.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import numpy as np

from headrace.contract import Array, TransportContext, WeightReceiver, WeightSource, WeightTransport
from headrace.registry import load

BUCKET = 8 << 20
DEADLINE = 120.0
GROUP_TIMEOUT = timedelta(seconds=120)
_LARGE, _SMALL = 4 << 20, 4 << 10


class Layers(WeightSource):
    """``flat``: about ``megabytes`` of random bytes, as float32 tensors of 4 MiB and of 4 KiB in turn."""

    def __init__(self, megabytes: int) -> None:
        self._count = round(megabytes * 1e6 / (_LARGE + _SMALL))
        nbytes = self._count * (_LARGE + _SMALL)
        self.flat: Array = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)

    def tensors(self) -> Iterator[tuple[str, Array]]:
        for number in range(self._count):
            start = number * (_LARGE + _SMALL)
            middle, stop = start + _LARGE, start + _LARGE + _SMALL
            yield f"layers.{number}.weight", self.flat[start:middle].view(np.float32).reshape(1024, -1)
            yield f"layers.{number}.norm", self.flat[middle:stop].view(np.float32)


class Receivers:
    """Processes that do what they are told, all at the same time."""

    def __init__(self, count: int, folder: Path, nbytes: int) -> None:
        self.count, self.folder = count, folder
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(folder / "bare"))
        self.listening.listen()
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(count + 1), str(folder), str(nbytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(1, count + 1)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.communicate()
        self.listening.close()

    def tell(self, command: str) -> None:
        """All of them, without an answer."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{command}\n")
            process.stdin.flush()

    def await_done(self) -> None:
        """RuntimeError when one of them has failed."""
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.readline() != "done\n":
                raise RuntimeError(f"a receiver has failed, with status {process.wait()}")

    def all(self, command: str) -> None:
        """Tell them, and wait until each has done it."""
        self.tell(command)
        self.await_done()


class Sockets:
    """A Unix socket to every receiver, and a thread that writes to it."""

    def __init__(self, source: Layers, receivers: Receivers, timed: Callable[[Callable[[], object]], float]) -> None:
        self._source, self._receivers, self._timed = source, receivers, timed
        receivers.tell("connect")
        self._sockets = [receivers.listening.accept()[0] for _ in range(receivers.count)]
        receivers.await_done()
        self._pool = ThreadPoolExecutor(receivers.count)

    def seconds(self) -> dict[str, float]:
        return {"fetch": self._timed(self._send)}

    def close(self) -> None:
        self._pool.shutdown()
        for connection in self._sockets:
            connection.close()

    def _send(self) -> None:
        self._receivers.tell("socket")
        list(self._pool.map(lambda connection: connection.sendall(self._source.flat.data), self._sockets))
        self._receivers.await_done()


class Gloo:
    """One group of all, made once."""

    def __init__(self, source: Layers, receivers: Receivers, timed: Callable[[Callable[[], object]], float]) -> None:
        self._source, self._receivers, self._timed = source, receivers, timed
        receivers.tell("join")
        self._group = group(receivers.folder, 0, receivers.count + 1)
        receivers.await_done()

    def seconds(self) -> dict[str, float]:
        return {"fetch": self._timed(self._send)}

    def close(self) -> None:
        self._group = None

    def _send(self) -> None:
        self._receivers.tell("gloo")
        broadcast(self._group, self._source.flat)
        self._receivers.await_done()


class Files:
    """A new one for every version."""

    def __init__(self, source: Layers, receivers: Receivers, timed: Callable[[Callable[[], object]], float]) -> None:
        self._source, self._receivers, self._timed = source, receivers, timed
        self._number = 0

    def seconds(self) -> dict[str, float]:
        self._number += 1
        file = self._receivers.folder / f"{self._number}.bytes"
        publish = self._timed(lambda: file.write_bytes(self._source.flat.data))
        fetch = self._timed(lambda: self._receivers.all(f"file {file}"))
        file.unlink()
        return {"publish": publish, "fetch": fetch, "together": publish + fetch}

    def close(self) -> None:
        """Nothing is open."""


def group(folder: Path, rank: int, world: int) -> Any:
    """Over the loopback interface, as ours is."""
    import torch.distributed as dist

    options: Any = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = GROUP_TIMEOUT
    return dist.ProcessGroupGloo(dist.FileStore(str(folder / "store"), world), rank, world, options)


def broadcast(members: Any, data: Array) -> None:
    import torch
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    for start in range(0, len(data), BUCKET):
        members.broadcast([torch.from_numpy(data[start : start + BUCKET])], options).wait()


def receive(connection: socket.socket, into: Array) -> None:
    left = into.data
    while len(left):
        left = left[connection.recv_into(left) :]


class Side:
    """One receiver."""

    def __init__(self, rank: int, world: int, folder: Path, nbytes: int) -> None:
        self._rank, self._world, self._folder = rank, world, folder
        self._memory = np.zeros(nbytes, np.uint8)
        self._receivers: dict[str, WeightReceiver] = {}
        self._bare = socket.socket(socket.AF_UNIX)
        self._group: Any = None

    def do(self, command: str, *words: str) -> None:
        if command == "open":
            name, address = words
            cls = load("weight_transport", name)
            assert issubclass(cls, WeightTransport)
            context = TransportContext(directory=str(self._folder), name=f"receiver-{self._rank}")
            self._receivers[name] = cls(cls.Settings()).receiver(context, address)
        elif command == "fetch":
            receiver = self._receivers[words[0]]
            for _ in receiver.fetch(receiver.manifest(int(words[1]), deadline=DEADLINE), deadline=DEADLINE):
                pass
        elif command == "connect":
            self._bare.connect(str(self._folder / "bare"))
        elif command == "join":
            self._group = group(self._folder, self._rank, self._world)
        elif command == "file":
            with open(words[0], "rb", buffering=0) as file:
                left = self._memory.data
                while len(left):
                    left = left[file.readinto(left) or 0 :]
        elif command == "socket":
            receive(self._bare, self._memory)
        else:
            broadcast(self._group, self._memory)

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()


def main() -> None:
    """Until stdin ends."""
    rank, world, folder, nbytes = sys.argv[1:]
    side = Side(int(rank), int(world), Path(folder), int(nbytes))
    for line in sys.stdin:
        side.do(*line.split())
        print("done", flush=True)
    side.close()


if __name__ == "__main__":
    main()
