"""Versions of a fake model that a node can load, published in the test's process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from headrace.contract import Array, Completion, TransportContext, WeightSource
from headrace.testing import FakeTrainingEngine, FakeWeightTransport
from headrace.testing.bigram import Bigram, load_bigram
from support.instances import PROMPT


class Weights(WeightSource):
    def __init__(self, tensors: dict[str, Array]) -> None:
        self._tensors = tensors

    def tensors(self) -> Iterator[tuple[str, Array]]:
        yield from self._tensors.items()


class Published:
    """Versions 0 to 2 of a model, each other weights; and 9, which lacks some."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o700)
        FakeTrainingEngine.create_model(str(folder / "model"), settings={}, seed=3)
        base = load_bigram(str(folder / "model"))
        publisher = FakeWeightTransport(FakeWeightTransport.Settings()).publisher(
            TransportContext(directory=str(folder), name="trainer")
        )
        self.address = publisher.address()
        self.models: dict[int, Bigram] = {}
        for version in range(3):
            generator = np.random.default_rng(version)
            tensors = {
                name: (tensor + generator.standard_normal(tensor.shape)).astype(np.float32)
                for name, tensor in base.tensors.items()
            }
            publisher.publish(version, Weights(tensors))
            self.models[version] = base.with_tensors(tensors)
        publisher.publish(9, Weights(dict([*base.tensors.items()][:1])))

    def logprobs(self, completion: Completion) -> list[float]:
        """Of its tokens, each under the version that is said to have sampled it."""
        versions = [s.version for s in completion.spans for _ in range(s.start, s.stop)]
        before = [int(PROMPT[-1]), *completion.token_ids.tolist()]
        return [
            float(self.models[version].logprobs(np.array([previous]), temperature=1.0)[0, token])
            for version, previous, token in zip(versions, before, completion.token_ids.tolist(), strict=False)
        ]
