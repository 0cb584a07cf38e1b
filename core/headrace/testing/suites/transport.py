"""The rules of the ``weight_transport`` role.

class TestMyTransport(WeightTransportContract):
    @pytest.fixture
    def plugin(self) -> WeightTransport:
        return MyTransport(MyTransport.Settings())
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest

from headrace.contract import (
    Array,
    TransportContext,
    WeightManifest,
    WeightPublisher,
    WeightReceiver,
    WeightSource,
    WeightTransport,
)
from headrace.errors import ContractError, DeadlineError, WireError
from headrace.testing.suites.plugin import PluginContract
from headrace.testing.suites.rules import check, override, raises, rule
from headrace.wire import Keys, manifest_digest, tensor_info

Tensors = Mapping[str, Array]


def weights(seed: int) -> dict[str, Array]:
    """Tensors of every kind of dtype, shape and layout."""
    generator = np.random.default_rng(seed)
    return {
        "embedding": generator.standard_normal((300, 40), dtype=np.float32),
        "half": generator.standard_normal((65, 33), dtype=np.float32).astype(ml_dtypes.bfloat16),
        "eighth": generator.standard_normal(1000, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn),
        "transposed": generator.standard_normal((70, 50), dtype=np.float32).T,
        "empty": np.empty((0, 7), dtype=np.float32),
        "scalar": np.array(generator.standard_normal()),
        "counts": generator.integers(0, 100, 17),
    }


class Source(WeightSource):
    """A trainer's weights; ``base``: further ones, which stay as they are."""

    def __init__(self, tensors: Tensors, base: Source | None = None) -> None:
        self._tensors = tensors
        self.base = base

    def tensors(self) -> Iterator[tuple[str, Array]]:
        if self.base is not None:
            yield from self.base.tensors()
        yield from self._tensors.items()


@dataclass(slots=True)
class Line:
    """A publisher, and receivers that are closed at the end. ``closed``: a rule has closed the publisher itself."""

    transport: WeightTransport
    directory: str
    publisher: WeightPublisher
    receivers: list[WeightReceiver] = field(default_factory=list)
    closed: bool = False

    def receiver(self) -> WeightReceiver:
        """Another engine's side."""
        context = TransportContext(directory=self.directory, name=f"rollout-{len(self.receivers)}")
        self.receivers.append(self.transport.receiver(context, self.publisher.address()))
        return self.receivers[-1]

    def publish(self, version: int, tensors: Tensors, *, base: Source | None = None) -> WeightManifest:
        """Publish ``tensors``, beside those of a base."""
        return self.publisher.publish(version, Source(tensors, base))


@contextmanager
def line(transport: WeightTransport) -> Iterator[Line]:
    """A publisher in a private directory of its own. Its path is short: that of a socket has a hundred bytes."""
    directory = tempfile.mkdtemp(prefix="headrace-")
    between = Line(transport, directory, transport.publisher(TransportContext(directory=directory, name="trainer")))
    try:
        yield between
    finally:
        for receiver in between.receivers:
            receiver.close()
        if not between.closed:
            between.publisher.close()
        shutil.rmtree(directory, ignore_errors=True)


class WeightTransportContract(PluginContract):
    """Subclass it and override :meth:`plugin`. ``deadline``: seconds in which a publisher answers."""

    deadline: ClassVar[float] = 10.0

    @pytest.fixture
    def plugin(self) -> WeightTransport:
        """A transport; settings that cut tensors into many chunks test more."""
        override("plugin", "a weight transport")

    @pytest.fixture
    def corrupting(self) -> WeightTransport | None:
        """A transport like ``plugin`` on whose way bytes are changed; None: the rule about it is skipped."""
        return None

    @rule("A version arrives bit for bit: every tensor in its dtype and shape, in the manifest's order.")
    def test_a_version_arrives_bit_for_bit(self, plugin: WeightTransport) -> None:
        with line(plugin) as between:
            between.publish(3, weights(1))
            self._arrives(between.receiver(), 3, weights(1))

    @rule("A manifest has every tensor's name, dtype, shape and xxh3-128 checksum, and the bytes of all.")
    def test_a_manifest_describes_every_tensor(self, plugin: WeightTransport) -> None:
        published = weights(1)
        with line(plugin) as between:
            told = between.publish(3, published)
            asked = between.receiver().manifest(3, deadline=self.deadline)
        expected = tuple(tensor_info(name, tensor) for name, tensor in published.items())
        nbytes = sum(tensor.nbytes for tensor in published.values())
        for who, manifest in (("the publisher", told), ("a receiver", asked)):
            check(manifest.tensors == expected, f"{who} has the tensors {manifest.tensors}")
            check((manifest.version, manifest.nbytes) == (3, nbytes), f"{who} has {manifest.nbytes} bytes of {nbytes}")

    @rule("A digest is over names, shapes, dtypes and checksums; it does not depend on the version number.")
    def test_a_digest_is_of_the_weights_alone(self, plugin: WeightTransport) -> None:
        with line(plugin) as between:
            digests = [between.publish(version, weights(version % 2)).digest for version in (1, 2, 3)]
        expected = [manifest_digest([tensor_info(*item) for item in weights(seed).items()]) for seed in (1, 0, 1)]
        check(digests == expected, f"versions 1, 2 and 3, of which 1 and 3 are equal, have {digests}, not {expected}")

    @rule("A published version does not change when the trainer's tensors do.")
    def test_a_published_version_is_a_copy(self, plugin: WeightTransport) -> None:
        live = weights(1)
        with line(plugin) as between:
            between.publish(1, live)
            for tensor in live.values():
                tensor[...] = 0
            self._arrives(between.receiver(), 1, weights(1))

    @rule("A version has the tensors of its source's base too: of the base that the source has then.")
    def test_a_version_has_the_tensors_of_its_base(self, plugin: WeightTransport) -> None:
        bases = [Source({f"kept.{name}": tensor for name, tensor in weights(seed).items()}) for seed in (8, 9)]
        with line(plugin) as between:
            for version, base in ((4, bases[0]), (5, bases[0]), (6, bases[1])):
                between.publish(version, weights(version), base=base)
            between.publisher.retire(4)
            for version, base in ((5, bases[0]), (6, bases[1])):
                found, expected = self._fetch(between.receiver(), version), {**dict(base.tensors()), **weights(version)}
                check(sorted(found) == sorted(expected), f"version {version} has the tensors {sorted(found)}")
                _check_equal({name: found[name] for name in expected}, expected)

    @rule("`fetch_some` hands out the tensors that are named, and no others.")
    def test_some_of_the_tensors_can_be_fetched(self, plugin: WeightTransport) -> None:
        with line(plugin) as between:
            between.publish(1, weights(1))
            receiver, some = between.receiver(), ("eighth", "half", "scalar")
            manifest = receiver.manifest(1, deadline=self.deadline)
            found = dict(receiver.fetch_some(manifest, some, deadline=self.deadline))
            self._arrives(receiver, 1, weights(1))
        _check_equal(found, {name: tensor for name, tensor in weights(1).items() if name in some})

    @rule("Publishing a version twice is a ContractError, and what was published first stays.")
    def test_a_version_is_published_once(self, plugin: WeightTransport) -> None:
        with line(plugin) as between:
            between.publish(1, weights(1))
            raises(ContractError, lambda: between.publish(1, weights(2)))
            self._arrives(between.receiver(), 1, weights(1))

    @rule("Versions are served until they are retired, also to a receiver that joins late.")
    def test_every_version_is_served_until_it_is_retired(self, plugin: WeightTransport) -> None:
        with line(plugin) as between:
            for version in range(3):
                between.publish(version, weights(version))
            late = between.receiver()
            for version in (2, 0, 1):
                self._arrives(late, version, weights(version))

    @rule("A version that is retired, or was never published, is a WireError.")
    def test_a_version_that_is_not_served_is_refused(self, plugin: WeightTransport) -> None:
        with line(plugin) as between:
            between.publish(1, weights(1))
            between.publish(2, weights(2))
            between.publisher.retire(1)
            receiver = between.receiver()
            for version in (1, 77):
                raises(WireError, lambda version=version: receiver.manifest(version, deadline=self.deadline))  # type: ignore[misc]  # mypy cannot infer a default's type

    @rule("`retire` of an unknown version is ignored.")
    def test_retiring_an_unknown_version_is_ignored(self, plugin: WeightTransport) -> None:
        with line(plugin) as between:
            between.publish(1, weights(1))
            between.publisher.retire(77)
            self._arrives(between.receiver(), 1, weights(1))

    @rule("Several receivers fetch at the same time.")
    def test_several_receivers_fetch_at_the_same_time(self, plugin: WeightTransport) -> None:
        with line(plugin) as between, ThreadPoolExecutor(2) as pool:
            for version in (1, 2):
                between.publish(version, weights(version))
            receivers = [between.receiver(), between.receiver()]
            fetched = list(pool.map(self._fetch, receivers, (1, 2)))
        for version, tensors in zip((1, 2), fetched, strict=True):
            _check_equal(tensors, weights(version))

    @rule("A receiver that leaves in the middle of a fetch disturbs nobody.")
    def test_a_receiver_that_leaves_disturbs_nobody(self, plugin: WeightTransport) -> None:
        with line(plugin) as between:
            between.publish(1, weights(1))
            leaving = between.receiver()
            next(leaving.fetch(leaving.manifest(1, deadline=self.deadline), deadline=self.deadline))
            leaving.close()
            self._arrives(between.receiver(), 1, weights(1))

    @rule("A publisher that does not answer is a DeadlineError, when the deadline has come.")
    def test_a_publisher_that_is_gone_is_a_deadline_error(self, plugin: WeightTransport) -> None:
        with line(plugin) as between:
            receiver = between.receiver()
            between.publisher.close()
            between.closed = True
            begin = time.monotonic()
            raises(DeadlineError, lambda: receiver.manifest(1, deadline=0.2))
            seconds = time.monotonic() - begin
        check(seconds < 5, f"with a deadline of 0.2 s it took {seconds:.1f} s")

    @rule(
        "Bytes that do not have the manifest's checksum are never handed out: they are asked for again, or a WireError."
    )
    def test_corrupt_bytes_are_never_handed_out(self, corrupting: WeightTransport | None) -> None:
        if corrupting is None:
            pytest.skip("override the fixture `corrupting` with a transport that changes bytes on their way")
        with line(corrupting) as between:
            between.publish(1, weights(1))
            try:
                fetched = self._fetch(between.receiver(), 1)
            except WireError:
                return
        _check_equal(fetched, weights(1))

    @rule("A transport that reaches other machines needs no folder that both sides have, only the publisher's host.")
    def test_what_reaches_other_machines_needs_no_shared_folder(self, plugin: WeightTransport) -> None:
        if not type(plugin).capabilities(plugin.settings).across_machines:
            pytest.skip("it declares that it reaches one machine")
        keys = Keys.generate().to_dict()
        with tempfile.TemporaryDirectory() as here, tempfile.TemporaryDirectory() as there:
            context = TransportContext(directory=here, name="trainer", host="127.0.0.1", keys=keys)
            with closing(plugin.publisher(context)) as publisher:
                publisher.publish(1, Source(weights(1)))
                context = TransportContext(directory=there, name="rollout-0", host="127.0.0.1", keys=keys)
                with closing(plugin.receiver(context, publisher.address())) as receiver:
                    self._arrives(receiver, 1, weights(1))

    @rule("The declared number of copies is at least 1, or None.")
    def test_copies_are_counted(self, plugin: WeightTransport) -> None:
        copies = type(plugin).capabilities(plugin.settings).copies
        check(copies is None or copies >= 1, f"copies is {copies}")

    @rule("`close` of either side may be called twice.")
    def test_close_may_be_called_twice(self, plugin: WeightTransport) -> None:
        with line(plugin) as between:
            between.publish(1, weights(1))
            between.receiver().close()
            between.publisher.close()

    def _fetch(self, receiver: WeightReceiver, version: int) -> dict[str, Array]:
        manifest = receiver.manifest(version, deadline=self.deadline)
        return dict(receiver.fetch(manifest, deadline=self.deadline))

    def _arrives(self, receiver: WeightReceiver, version: int, expected: Tensors) -> None:
        _check_equal(self._fetch(receiver, version), expected)


def _check_equal(found: Tensors, expected: Tensors) -> None:
    check(list(found) == list(expected), f"published were {list(expected)}, and {list(found)} arrived")
    for name, tensor in expected.items():
        there = found[name]
        kinds = f"{tensor.dtype} {list(tensor.shape)} arrived as {there.dtype} {list(there.shape)}"
        check((tensor.dtype, tensor.shape) == (there.dtype, there.shape), f"{name} of {kinds}")
        check(tensor.tobytes() == there.tobytes(), f"the bytes of {name} changed on their way")
