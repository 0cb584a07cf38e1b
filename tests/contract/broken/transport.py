"""Weight transports that break one rule each; ``breaks`` names the rule's test."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from headrace.contract import (
    Array,
    TransportCapabilities,
    TransportContext,
    WeightManifest,
    WeightPublisher,
    WeightReceiver,
    WeightSource,
    WeightTransport,
)
from headrace.errors import WireError
from headrace.testing import FakeWeightTransport
from headrace.testing.suites import WeightTransportContract
from headrace.testing.transport import FakePublisher, FakeReceiver


def made_of(publisher: type[FakePublisher], receiver: type[FakeReceiver]) -> WeightTransport:
    """A transport with these two sides."""

    class Made(FakeWeightTransport):
        def publisher(self, context: TransportContext) -> WeightPublisher:
            return publisher(Path(context.directory) / "weights", self.settings)

        def receiver(self, context: TransportContext, address: str) -> WeightReceiver:
            return receiver(Path(address), self.settings)

    return Made(FakeWeightTransport.Settings())


class Flipping(FakeReceiver):
    """On its way every byte changes."""

    def _received(self, data: bytearray) -> bytearray:
        return bytearray(byte ^ 1 for byte in data)


class Broken(WeightTransportContract):
    """Subclasses say which publisher, or which receiver."""

    Publisher: type[FakePublisher] = FakePublisher
    Receiver: type[FakeReceiver] = FakeReceiver
    Corrupting: type[FakeReceiver] = Flipping

    @pytest.fixture
    def plugin(self) -> WeightTransport:
        return made_of(self.Publisher, self.Receiver)

    @pytest.fixture
    def corrupting(self) -> WeightTransport:
        return made_of(self.Publisher, self.Corrupting)


class TestWidensTheHalf(Broken):
    breaks = "test_a_version_arrives_bit_for_bit"

    class Receiver(FakeReceiver):
        def fetch(self, manifest: WeightManifest, *, deadline: float) -> Iterator[tuple[str, Array]]:
            odd = manifest.version == 3
            for name, tensor in super().fetch(manifest, deadline=deadline):
                yield name, tensor.astype(np.float32) if odd and tensor.dtype == ml_dtypes.bfloat16 else tensor


class TestForgetsTheBytes(Broken):
    breaks = "test_a_manifest_describes_every_tensor"

    class Publisher(FakePublisher):
        def publish(self, version: int, source: WeightSource) -> WeightManifest:
            return replace(super().publish(version, source), nbytes=0)


class TestDigestsTheVersion(Broken):
    breaks = "test_a_digest_is_of_the_weights_alone"

    class Publisher(FakePublisher):
        def publish(self, version: int, source: WeightSource) -> WeightManifest:
            manifest = super().publish(version, source)
            return replace(manifest, digest=f"{version}-{manifest.digest}")


class TestServesTheLive(Broken):
    breaks = "test_a_published_version_is_a_copy"

    live: Any = None

    class Publisher(FakePublisher):
        def publish(self, version: int, source: WeightSource) -> WeightManifest:
            TestServesTheLive.live = list(source.tensors())
            return super().publish(version, source)

    class Receiver(FakeReceiver):
        def fetch(self, manifest: WeightManifest, *, deadline: float) -> Iterator[tuple[str, Array]]:
            live = TestServesTheLive.live
            overwritten = not any(tensor.any() for _, tensor in live)
            yield from live if overwritten else super().fetch(manifest, deadline=deadline)


class TestForgetsTheBase(Broken):
    breaks = "test_a_version_has_the_tensors_of_its_base"

    class Publisher(FakePublisher):
        def publish(self, version: int, source: WeightSource) -> WeightManifest:
            class Changing(WeightSource):
                def tensors(self) -> Iterator[tuple[str, Array]]:
                    return source.changing()

            return super().publish(version, Changing())


class TestFetchesAll(Broken):
    breaks = "test_some_of_the_tensors_can_be_fetched"

    class Receiver(FakeReceiver):
        def fetch_some(
            self, manifest: WeightManifest, names: Collection[str], *, deadline: float
        ) -> Iterator[tuple[str, Array]]:
            return self.fetch(manifest, deadline=deadline)


class TestPublishesAgain(Broken):
    breaks = "test_a_version_is_published_once"

    class Publisher(FakePublisher):
        def publish(self, version: int, source: WeightSource) -> WeightManifest:
            self.retire(version)
            return super().publish(version, source)


class TestKeepsTwoVersions(Broken):
    breaks = "test_every_version_is_served_until_it_is_retired"

    class Publisher(FakePublisher):
        def publish(self, version: int, source: WeightSource) -> WeightManifest:
            self.retire(version - 2)
            return super().publish(version, source)


class TestNeverRetires(Broken):
    breaks = "test_a_version_that_is_not_served_is_refused"

    class Publisher(FakePublisher):
        def retire(self, version: int) -> None:
            pass


class TestMindsUnknownVersions(Broken):
    breaks = "test_retiring_an_unknown_version_is_ignored"

    class Publisher(FakePublisher):
        def retire(self, version: int) -> None:
            if not (self._folder / str(version)).exists():
                raise WireError("unknown version")
            super().retire(version)


class TestServesOneAtATime(Broken):
    breaks = "test_several_receivers_fetch_at_the_same_time"

    class Receiver(FakeReceiver):
        def fetch(self, manifest: WeightManifest, *, deadline: float) -> Iterator[tuple[str, Array]]:
            if threading.current_thread() is not threading.main_thread() and manifest.version == 2:
                raise WireError("busy with another receiver")
            yield from super().fetch(manifest, deadline=deadline)


class TestLeavesWithTheLine(Broken):
    breaks = "test_a_receiver_that_leaves_disturbs_nobody"

    class Receiver(FakeReceiver):
        unfinished = False

        def fetch(self, manifest: WeightManifest, *, deadline: float) -> Iterator[tuple[str, Array]]:
            self.unfinished = True
            yield from super().fetch(manifest, deadline=deadline)
            self.unfinished = False

        def close(self) -> None:
            if self.unfinished:
                FakePublisher.retire(self, 1)  # type: ignore[arg-type]  # it has the folder too


class TestSaysNothingOfTheDeadline(Broken):
    breaks = "test_a_publisher_that_is_gone_is_a_deadline_error"

    class Receiver(FakeReceiver):
        def _await_publisher(self, deadline: float, what: str) -> None:
            if not self._folder.is_dir():
                raise WireError("nobody is there")


class TestHandsOutAnything(Broken):
    breaks = "test_corrupt_bytes_are_never_handed_out"

    class Corrupting(Flipping):
        def _verify(self, tensor: Array, checksum: str, what: str) -> None:
            pass


class TestClosesOnce(Broken):
    breaks = "test_close_may_be_called_twice"

    class Publisher(FakePublisher):
        def close(self) -> None:
            if not self._folder.exists():
                raise WireError("closed already")
            super().close()


class TestLooksInItsOwnFolder(Broken):
    breaks = "test_what_reaches_other_machines_needs_no_shared_folder"

    @pytest.fixture
    def plugin(self) -> WeightTransport:
        class Near(FakeWeightTransport):
            @classmethod
            def capabilities(cls, settings: Any) -> TransportCapabilities:
                return TransportCapabilities(across_machines=True)

            def receiver(self, context: TransportContext, address: str) -> WeightReceiver:
                return FakeReceiver(Path(context.directory) / Path(address).name, self.settings)

        return Near(FakeWeightTransport.Settings())


class TestCountsNoCopies(Broken):
    breaks = "test_copies_are_counted"

    @pytest.fixture
    def plugin(self) -> WeightTransport:
        class Free(FakeWeightTransport):
            @classmethod
            def capabilities(cls, settings: Any) -> TransportCapabilities:
                return TransportCapabilities(copies=0)

        return Free(FakeWeightTransport.Settings())
