"""Checksums of weights, so that every node of a run computes the same ones."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import xxhash

from headrace.contract import Array, TensorInfo
from headrace.wire.arrays import array_bytes


def tensor_checksum(array: Array) -> str:
    """xxh3-128 of the tensor's bytes in C order, 32 hexadecimal characters. Does not hold the GIL."""
    contiguous = array if array.flags.c_contiguous else array.copy(order="C")
    return xxhash.xxh3_128_hexdigest(array_bytes(contiguous))


def tensor_info(name: str, array: Array) -> TensorInfo:
    """What a manifest says of a tensor."""
    return TensorInfo(
        name=name, dtype=array.dtype.name, shape=tuple(array.shape), checksum=tensor_checksum(np.asarray(array))
    )


def manifest_digest(tensors: Iterable[TensorInfo]) -> str:
    """xxh3-128 over names, dtypes, shapes and checksums, in the order of the names."""
    facts = sorted((t.name, t.dtype, t.shape, t.checksum) for t in tensors)
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(facts))
