"""Arrays on the wire: a msgpack extension that names dtype, shape and the frame that holds the bytes.

Invariant: no bytes are ever interpreted as anything but numbers, and never more or fewer of them than
dtype and shape say. Received arrays are writable, aligned and, above ``INLINE_BYTES``, views on their frame.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import ml_dtypes
import msgspec
import numpy as np

from headrace.contract import Array
from headrace.wire.refusal import BAD_FRAME, RefusedError

Buffer: TypeAlias = bytes | bytearray | memoryview

INLINE_BYTES = 1 << 14
"""Up to here an array travels inside the header: a frame costs more than the copies."""

_FRAMED = 1
_INLINE = 2
_MAX_DIMENSIONS = 32
_MAX_LAYOUT_BYTES = 255
_NUMBER_BYTES = 4
_NUMBERS = re.compile(r"[<>|][biufc][0-9]{1,2}")
"""What may be asked of numpy, which warns of some names, and reads things into others, that are no dtype's."""
_MINI_FLOATS: dict[str, np.dtype[Any]] = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int4", "uint4")
}


class _Layout(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode_layout = msgspec.msgpack.Decoder(_Layout).decode


def array_bytes(array: Array) -> memoryview:
    """The bytes of a C-contiguous array, without a copy (ml_dtypes have no buffer protocol of their own)."""
    return array.reshape(-1).view(np.uint8).data


@lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """How a dtype is spelled on the wire: ``bfloat16``, ``<f4``. TypeError for one that cannot travel."""
    if dtype.name in _MINI_FLOATS:
        return dtype.name
    if dtype.kind not in "biufc":
        raise TypeError(f"arrays of dtype {dtype} do not travel; numbers and bool do")
    return dtype.str


@lru_cache(maxsize=256)
def parse_dtype(name: str) -> np.dtype[Any]:
    """The dtype of that name. RefusedError for anything :func:`dtype_name` would not write."""
    if name in _MINI_FLOATS:
        return _MINI_FLOATS[name]
    if _NUMBERS.fullmatch(name):
        with suppress(TypeError):  # there is none of that size
            dtype: np.dtype[Any] = np.dtype(name)
            if dtype_name(dtype) == name:
                return dtype
    raise RefusedError(f"an array of unknown dtype {name!r}", reason=BAD_FRAME)


class _Frames(threading.local):
    """Of the message that this thread is encoding, and of the one that it is decoding."""

    sent: list[Buffer] | None = None
    received: Sequence[Any] = ()


local_frames = _Frames()


def pack(item: object) -> object:
    """What the header has in place of what msgspec cannot encode. An array is an extension: a byte that says how long
    the layout is, the layout, then the array's bytes or the number of its frame, which is appended to those that are
    sent where the array does not fit inline. TypeError for what cannot travel."""
    if not isinstance(item, np.ndarray):
        if isinstance(item, np.generic):
            return item.item()
        raise TypeError(f"values of type {type(item).__qualname__} do not travel")
    layout = _layout(item.dtype, item.shape)
    if item.nbytes <= INLINE_BYTES:
        return msgspec.msgpack.Ext(_INLINE, layout + item.tobytes())
    assert local_frames.sent is not None
    local_frames.sent.append(array_bytes(item if item.flags.c_contiguous else item.copy(order="C")))
    return msgspec.msgpack.Ext(_FRAMED, layout + (len(local_frames.sent) - 1).to_bytes(_NUMBER_BYTES, "big"))


def unpack(code: int, payload: memoryview) -> Array:
    """The array of an extension. RefusedError when extension and received frames do not fit together."""
    if not payload:
        raise RefusedError("an empty msgpack extension", reason=BAD_FRAME)
    start = 1 + payload[0]
    if code == _INLINE:
        dtype, shape, nbytes = _parse_layout(bytes(payload[:start]))
        if len(payload) - start != nbytes:
            raise _misfit(dtype, shape, len(payload) - start)
        inline: Array = np.ndarray(shape, dtype, bytearray(payload[start:]))
        return inline
    if code != _FRAMED:
        raise RefusedError(f"an unknown msgpack extension {code}", reason=BAD_FRAME)
    dtype, shape, nbytes = _parse_layout(bytes(payload[:start]))
    number, received = int.from_bytes(payload[start : start + _NUMBER_BYTES], "big"), local_frames.received
    if number >= len(received) or len(payload) != start + _NUMBER_BYTES:
        raise RefusedError(f"array frame {number} of a message with {len(received)}", reason=BAD_FRAME)
    data = memoryview(received[number])
    if data.nbytes != nbytes:
        raise _misfit(dtype, shape, data.nbytes)
    array: Array = np.ndarray(shape, dtype, buffer=data)
    return array if array.flags.aligned and array.flags.writeable else array.copy()


@lru_cache(maxsize=1024)
def _layout(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    layout = _encode(_Layout(dtype_name(dtype), shape))
    if len(layout) > _MAX_LAYOUT_BYTES:
        raise TypeError(f"arrays of shape {shape} do not travel; the lengths of their dimensions are too many")
    return bytes([len(layout)]) + layout


@lru_cache(maxsize=1024)
def _parse_layout(layout: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Dtype, shape and number of bytes."""
    try:
        described = _decode_layout(layout[1:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(f"an array whose layout cannot be read: {error}", reason=BAD_FRAME) from error
    dtype, shape = parse_dtype(described.dtype), described.shape
    if len(shape) > _MAX_DIMENSIONS or any(length < 0 for length in shape):
        raise RefusedError(f"an array of impossible shape {shape}", reason=BAD_FRAME)
    return dtype, shape, prod(shape) * dtype.itemsize


def _misfit(dtype: np.dtype[Any], shape: tuple[int, ...], nbytes: int) -> RefusedError:
    return RefusedError(
        f"{nbytes} bytes for an array of {dtype.name} {shape}, which takes {prod(shape) * dtype.itemsize}",
        reason=BAD_FRAME,
    )
