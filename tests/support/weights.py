"""What the tests of weight transports share: sources, and a process that can be killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from headrace.contract import Array, WeightReceiver, WeightSource


class Source(WeightSource):
    """These tensors."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self._tensors = tensors

    def tensors(self) -> Iterator[tuple[str, Array]]:
        yield from self._tensors.items()


def weights(seed: int, *, rows: int = 300) -> dict[str, Array]:
    """Two matrices."""
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal((rows, 100), dtype=np.float32) for name in ("first", "second")}


def fetch(receiver: WeightReceiver, version: int, *, deadline: float = 10) -> dict[str, Array]:
    """All tensors of a version."""
    return dict(receiver.fetch(receiver.manifest(version, deadline=deadline), deadline=deadline))


def equal(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    """The same tensors, to the bit."""
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].tobytes() == other[name].tobytes()
        for name in one
    )


@contextmanager
def other_process(script: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Python that runs ``script``, and the line that it printed when it was ready; killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()
