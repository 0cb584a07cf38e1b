"""Cases G01, G03, G10 (weight transport), M02 (ports) and M03 (processes)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from headrace.contract import (
    Array,
    TensorInfo,
    TransportContext,
    WeightManifest,
    WeightPublisher,
    WeightReceiver,
    WeightSource,
)
from headrace.errors import DeadlineError, WireError
from headrace.wire import Client, Keys, Server, ipc_address, manifest_digest, rpc, tcp_address, tensor_info
from headrace_weights.zmq import ZmqSettings, ZmqTransport


class Source(WeightSource):
    def __init__(self, tensors: dict[str, Array]) -> None:
        self._tensors = tensors

    def tensors(self) -> Iterator[tuple[str, Array]]:
        yield from self._tensors.items()


def weights(seed: int, *, count: int = 50) -> dict[str, Array]:
    """``count`` tensors of mixed dtypes and sizes from nothing to half a MB."""
    rng = np.random.default_rng(seed)
    dtypes = [np.float32, ml_dtypes.bfloat16, np.float16, np.int64, ml_dtypes.float8_e4m3fn]
    sizes = [(0,), (), (1,), (7, 3), (33, 65), (64, 128), (3, 5, 7), (256, 256)]
    return {
        f"layer.{i}.weight": (10 * rng.standard_normal(sizes[i % len(sizes)])).astype(dtypes[i % len(dtypes)])
        for i in range(count)
    }


def context(directory: Path, name: str) -> TransportContext:
    return TransportContext(directory=str(directory), name=name)


def digest(tensors: dict[str, Array]) -> str:
    return manifest_digest(tensor_info(name, tensor) for name, tensor in tensors.items())


def fetch(receiver: WeightReceiver, version: int) -> dict[str, Array]:
    return dict(receiver.fetch(receiver.manifest(version, deadline=10), deadline=10))


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[WeightPublisher]:
    made = ZmqTransport(ZmqSettings()).publisher(context(tmp_path, "trainer"))
    yield made
    made.close()


def receiver(publisher: WeightPublisher, directory: Path, **settings: int) -> WeightReceiver:
    return ZmqTransport(ZmqSettings(**settings)).receiver(context(directory, "rollout"), publisher.address())


def test_G01_weights_sent_as_A_B_A_arrive_with_the_digests_of_A_B_A(publisher: WeightPublisher, tmp_path: Path) -> None:
    engine = receiver(publisher, tmp_path)
    published, received = [], []
    for version, seed in enumerate((1, 2, 1)):
        published.append(publisher.publish(version, Source(weights(seed))).digest)
        received.append(digest(fetch(engine, version)))
    assert received == published
    assert received[0] == received[2] != received[1]
    engine.close()


@pytest.mark.parametrize("fault", ["drop", "zero", "stale"])
def test_G01_a_tensor_that_is_missing_zeroed_or_old_is_never_a_success(
    publisher: WeightPublisher, tmp_path: Path, fault: str
) -> None:
    right = publisher.publish(1, Source(weights(1)))
    wrong = weights(2 if fault == "stale" else 1)
    if fault == "drop":
        del wrong["layer.7.weight"]
    elif fault == "zero":
        wrong["layer.7.weight"] = np.zeros_like(wrong["layer.7.weight"])
    served = publisher.publish(2, Source(wrong))
    claimed = WeightManifest(version=2, tensors=right.tensors, nbytes=right.nbytes, digest=right.digest)
    engine = receiver(publisher, tmp_path)
    with pytest.raises(WireError, match="of version 2"):
        dict(engine.fetch(claimed, deadline=1))
    assert served.digest != right.digest
    engine.close()


def test_G03_the_result_does_not_depend_on_chunk_size_window_or_order(
    publisher: WeightPublisher, tmp_path: Path
) -> None:
    sent = weights(3)
    backwards = dict(reversed(sent.items()))
    manifests = [publisher.publish(0, Source(sent)), publisher.publish(1, Source(backwards))]
    assert manifests[0].digest == manifests[1].digest
    total = manifests[0].nbytes
    for chunk_bytes in (5000, 1 << 17, 1 << 20, total):
        for window in (1, 7):
            engine = receiver(publisher, tmp_path, chunk_bytes=chunk_bytes, window=window)
            for version, expected in ((0, sent), (1, backwards)):
                received = fetch(engine, version)
                assert list(received) == list(expected)
                assert digest(received) == manifests[0].digest
            engine.close()


def test_G03_a_slow_reader_gets_the_same_bytes_while_the_trainer_goes_on(
    publisher: WeightPublisher, tmp_path: Path
) -> None:
    live = {"w": np.ones(100_000, np.float32)}
    manifest = publisher.publish(0, Source(live))
    slow, fast = (receiver(publisher, tmp_path, chunk_bytes=1000, window=2) for _ in range(2))
    tensors = slow.fetch(slow.manifest(0, deadline=5), deadline=5)
    for version in range(1, 6):
        live["w"] += 1
        publisher.publish(version, Source(live))
        assert fetch(fast, version)["w"][0] == version + 1
    assert digest(dict(tensors)) == manifest.digest
    slow.close()
    fast.close()


class Engine:
    """Serves generations while it fetches weights in a thread."""

    def __init__(self, weights: WeightReceiver) -> None:
        self._weights = weights
        self.digests: list[str] = []

    @rpc
    async def generate(self, request: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return [token + 1 for token in request]

    @rpc
    async def update(self, request: int) -> str:
        self.digests.append(digest(await asyncio.to_thread(fetch, self._weights, request)))
        return self.digests[-1]

    @rpc
    async def stuck(self, request: None) -> None:
        await asyncio.Event().wait()


async def test_G10_generations_and_updates_side_by_side_neither_hang_nor_mix(
    publisher: WeightPublisher, tmp_path: Path
) -> None:
    transport = receiver(publisher, tmp_path, chunk_bytes=4096)
    engine = Engine(transport)
    server = Server(engine, address=ipc_address(str(tmp_path), "engine"))
    client = Client(await server.start())

    async def updates() -> list[str]:
        digests = []
        for version in range(20):
            manifest = await asyncio.to_thread(publisher.publish, version, Source(weights(version, count=8)))
            assert await client.call("update", version, reply=str, deadline=20) == manifest.digest
            digests.append(manifest.digest)
        return digests

    async def generations(number: int) -> None:
        for step in range(10):
            tokens = [number, step]
            assert await client.call("generate", tokens, reply=list[int], deadline=20) == [number + 1, step + 1]

    digests, *_ = await asyncio.gather(updates(), *(generations(number) for number in range(50)))
    assert engine.digests == digests
    assert not server.refused
    await client.close()
    await server.close()
    transport.close()


async def test_G10_a_blocked_instance_is_named_within_the_deadline(tmp_path: Path) -> None:
    class NoWeights(WeightReceiver):
        def manifest(self, version: int, *, deadline: float) -> WeightManifest:
            raise NotImplementedError

        def fetch(self, manifest: WeightManifest, *, deadline: float) -> Iterator[tuple[str, Array]]:
            raise NotImplementedError

        def close(self) -> None:
            raise NotImplementedError

    server = Server(Engine(NoWeights()), address=ipc_address(str(tmp_path), "rollout-3"))
    client = Client(await server.start())
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"stuck .*rollout-3.* in 0.1 s, awaiting rollout-3 to commit version 9"):
        await client.call("stuck", deadline=0.1, awaiting="rollout-3 to commit version 9")
    assert time.monotonic() - start < 2
    assert await client.call("generate", [1], reply=list[int], deadline=5) == [2]
    await client.close()
    await server.close()


async def test_G10_a_publisher_that_stops_answering_is_named_within_the_deadline(tmp_path: Path) -> None:
    info = TensorInfo(name="w", dtype="float32", shape=(1,), checksum="")
    manifest = WeightManifest(version=4, tensors=(info,), nbytes=4, digest="")
    with socket.socket(socket.AF_UNIX) as silent:  # accepts and says nothing
        silent.bind(str(tmp_path / "silent.sock"))
        silent.listen()
        engine = ZmqTransport(ZmqSettings()).receiver(context(tmp_path, "rollout"), f"ipc://{tmp_path}/silent.sock")
        with pytest.raises(DeadlineError, match=r"silent.* in 0.1 s, awaiting tensor w of version 4"):
            await asyncio.to_thread(lambda: dict(engine.fetch(manifest, deadline=0.1)))
        engine.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_M02_64_services_started_at_once_listen_on_64_ports() -> None:
    keys = Keys.generate()
    for _ in range(2):
        servers = [Server(Engine.__new__(Engine), address=tcp_address("127.0.0.1"), keys=keys) for _ in range(64)]
        addresses = await asyncio.gather(*(server.start() for server in servers))
        assert len(set(addresses)) == 64
        clients = [Client(address, keys=keys) for address in addresses]
        replies = await asyncio.gather(
            *(c.call("generate", [i], reply=list[int], deadline=20) for i, c in enumerate(clients))
        )
        assert replies == [[i + 1] for i in range(64)]
        await asyncio.gather(*(client.close() for client in clients), *(server.close() for server in servers))


async def test_M02_a_port_in_use_is_an_error_at_once_and_leaks_nothing() -> None:
    keys = Keys.generate()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        counts = []
        for _ in range(3):
            server = Server(Engine.__new__(Engine), address=tcp_address("127.0.0.1", port), keys=keys)
            with pytest.raises(WireError, match=f"cannot listen on tcp://127.0.0.1:{port}") as raised:
                await server.start()
            assert "port 0" in raised.value.fix
            await server.close()
            counts.append(open_files())
    assert counts[0] == counts[1] == counts[2]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def soon(condition: Callable[[], bool], *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)  # between looks at files and processes that nobody announces


DRIVER = textwrap.dedent("""
    import asyncio, os, sys
    from headrace.contract import NodeLaunch, NoSettings
    from headrace_launchers.local import LocalLauncher

    async def main(directory, fail):
        launcher = LocalLauncher(NoSettings())
        for number in range(4):
            if fail and number == 2:
                raise RuntimeError("child 3 cannot be started")
            arguments, log = ("-c", sys.argv[2], str(number)), f"{directory}/{number}.log"
            await launcher.launch(NodeLaunch(
                name="node", python=sys.executable, arguments=arguments, environment={"RUN": directory}, log_path=log))
        await asyncio.Event().wait()

    asyncio.run(main(sys.argv[1], sys.argv[3] == "fail"))
""")

CHILD = textwrap.dedent("""
    import asyncio, os, sys
    from headrace.wire import Server, ipc_address, rpc

    class Node:
        @rpc
        async def ping(self, request: None) -> int:
            return os.getpid()

    async def main():
        await Server(Node(), address=ipc_address(os.environ["RUN"], "node-" + sys.argv[1])).start()
        with open(os.environ["RUN"] + "/pids", "a") as pids:
            pids.write(f"{os.getpid()}\\n")
        await asyncio.Event().wait()

    asyncio.run(main())
""")


def pids(directory: Path) -> list[int]:
    path = directory / "pids"
    return [int(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


@pytest.mark.parametrize("end", ["kill -9", "Ctrl-C", "exception in init of child 3"])
async def test_M03_no_child_outlives_the_driver_and_a_restart_at_the_same_addresses_works(
    tmp_path: Path, end: str
) -> None:
    for how in (end, "kill -9"):  # the second driver is the restart
        fail = how.startswith("exception")
        driver = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DRIVER, str(tmp_path), CHILD, "fail" if fail else "", stderr=asyncio.subprocess.PIPE
        )
        if not fail:
            with ThreadPoolExecutor(1) as pool:
                await asyncio.get_running_loop().run_in_executor(
                    pool, lambda: soon(lambda: len(pids(tmp_path)) == 4, seconds=60)
                )
            for number in range(4):
                client = Client(ipc_address(str(tmp_path), f"node-{number}"))
                assert await client.call("ping", reply=int, deadline=30) in pids(tmp_path)
                await client.close()
            driver.send_signal(signal.SIGINT if how == "Ctrl-C" else signal.SIGKILL)
        await driver.communicate()
        soon(lambda: not any(map(alive, pids(tmp_path))), seconds=10)
        (tmp_path / "pids").unlink(missing_ok=True)
