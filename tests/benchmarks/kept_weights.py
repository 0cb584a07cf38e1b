"""A weight transport whose files stay, and what the deltas between a run's versions come to.

``Kept`` is named by the job of a benchmark, as ``kept_weights.py:Kept``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from headrace.contract import Array, TransportContext, WeightPublisher
from headrace.wire import array_bytes
from headrace_weights.disk.deltas import encode
from headrace_weights.disk.publisher import DiskPublisher
from headrace_weights.disk.transport import DiskTransport


class _Keeping(DiskPublisher):
    def retire(self, version: int) -> None:
        """Everything stays."""

    def close(self) -> None:
        """Everything stays."""


class Kept(DiskTransport):
    """Every version whole in ``path``, for good."""

    def publisher(self, context: TransportContext) -> WeightPublisher:
        return _Keeping(self.settings.path, full_every=1)


def versions(folder: Path) -> list[Mapping[str, Array]]:
    """All that a run published, in order."""
    files = sorted(folder.glob("*/*.safetensors"), key=lambda file: int(file.stem))
    return [load_file(file) for file in files]


def delta_bytes(old: Mapping[str, Array], new: Mapping[str, Array], dtype: Any) -> tuple[int, int]:
    """Of what differs, and of all tensors, when both are published as ``dtype``."""
    parts = whole = 0
    for number, name in enumerate(new):
        before, after = (_raw(tensors[name], dtype) for tensors in (old, new))
        parts += sum(part.nbytes for _, part in encode(number, after, before, np.dtype(dtype).itemsize))
        whole += len(after)
    return parts, whole


def shares(published: list[Mapping[str, Array]]) -> dict[str, Any]:
    """Median share of a version's bytes that a delta to the one before takes, and to the one nine before."""
    result: dict[str, Any] = {}
    for dtype in (np.float32, ml_dtypes.bfloat16):
        for distance in (1, 9):
            found = [delta_bytes(*pair, dtype) for pair in _pairs(published, distance)]
            if found:
                result[f"{np.dtype(dtype).name}, {distance} back"] = {
                    "delta_bytes": statistics.median(parts for parts, _ in found),
                    "whole_bytes": found[0][1],
                    "share": statistics.median(parts / whole for parts, whole in found),
                }
    return result


def _pairs(published: list[Mapping[str, Array]], distance: int) -> Iterator[tuple[Mapping[str, Array], ...]]:
    yield from zip(published[:-distance], published[distance:], strict=True)


def _raw(tensor: Array, dtype: Any) -> Array:
    return np.frombuffer(array_bytes(np.ascontiguousarray(tensor).astype(dtype)), np.uint8)
