"""A file of weights that is written tensor by tensor, as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

from headrace.contract.columns import Array
from headrace.wire import array_bytes

_DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}
"""Name and bytes in a safetensors file."""


def write_weights(
    path: Path, tensors: Iterator[tuple[str, Array]], shapes: Mapping[str, tuple[int, ...]], *, dtype: str
) -> None:
    """``tensors``: those of ``shapes``, in their order, in ``dtype``."""
    with path.open("wb") as file:
        _write_header(file, shapes, dtype)
        for (name, tensor), expected in zip(tensors, shapes, strict=True):
            assert name == expected
            file.write(array_bytes(tensor))


def _write_header(file: BinaryIO, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
    """As in safetensors: the header's length in 8 bytes, little-endian, and the header, of a multiple of 8 bytes."""
    kind, width = _DTYPES[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        stop = start + width * prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": (start, stop)}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
