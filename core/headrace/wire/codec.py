"""Values ↔ frames: one msgpack header, then one raw frame per array. No pickle, no code, no copies.

A header is decoded into a given type or refused. ``Any`` fields decode to plain values and arrays.
Arrays are not copied: one that is still being sent must not be changed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar, get_type_hints

import msgspec
import numpy as np

from headrace.contract import Ragged, Repeated
from headrace.errors import ContractError
from headrace.wire.arrays import Buffer, local_frames, pack, unpack
from headrace.wire.limits import DEFAULT_LIMITS, Limits
from headrace.wire.messages import Call
from headrace.wire.refusal import (
    FRAME_TOO_LARGE,
    HEADER_TOO_LARGE,
    MALFORMED,
    TOO_MANY_FRAMES,
    WRONG_TYPE,
    RefusedError,
    to_caller,
)
from headrace.wire.schema import ColumnOnWire, ValueOnWire, restore, wire_type

T = TypeVar("T")

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def encode(value: object) -> list[Buffer]:
    """Header and array frames of ``value``. TypeError for a value that cannot travel."""
    arrays: list[Buffer] = []
    local_frames.sent = arrays
    try:
        header = _encode(value)
    finally:
        local_frames.sent = None
    return [header, *arrays]


def encode_call(call: Call[object], limits: Limits) -> tuple[Buffer, list[Buffer]]:
    """:meth:`encode`, header and arrays; ContractError for what cannot travel, or is over a bound."""
    try:
        header, *arrays = encode(call)
        check_limits(len(header), arrays, limits)
    except TypeError as error:
        raise ContractError(
            f"{call.method}: {error}", fix="send numbers, text, and numpy arrays of numbers or bool"
        ) from error
    except OverflowError as error:
        raise ContractError(f"{call.method}: a whole number of more than 64 bits", fix="give a smaller one") from error
    except UnicodeEncodeError as error:
        raise ContractError(
            f"{call.method}: {error.object!r:.60} is no text: {error.reason}", fix="give text that UTF-8 can write"
        ) from error
    except RefusedError as refusal:
        raise to_caller(call.method, refusal) from refusal
    return header, arrays


_encode = msgspec.msgpack.Encoder(enc_hook=pack).encode


def decode(frames: Sequence[Any], kind: type[T], *, limits: Limits = DEFAULT_LIMITS) -> T:
    """The value of a message, frames as :func:`encode` made them. RefusedError when it is not a ``kind``."""
    if not frames:
        raise RefusedError("a message without a header", reason=MALFORMED)
    header, *arrays = [memoryview(frame).cast("B") for frame in frames]
    check_limits(len(header), arrays, limits)
    value: T = decoder_for(kind).decode(header, arrays)
    return value


def check_limits(header: int, arrays: Sequence[Any], limits: Limits) -> None:
    """RefusedError when a message of a header of so many bytes and these frames is over a bound."""
    if header > limits.header_bytes:
        raise RefusedError(
            f"a message header of {header:,} bytes; at most {limits.header_bytes:,} are allowed",
            reason=HEADER_TOO_LARGE,
            fix="send, or ask for, less at once",
        )
    if not arrays:
        return
    if len(arrays) > limits.frames:
        raise RefusedError(
            f"a message of {len(arrays)} arrays; at most {limits.frames} are allowed",
            reason=TOO_MANY_FRAMES,
            fix="join rows into a Ragged column",
        )
    largest = max(map(len, arrays))
    if largest > limits.frame_bytes:
        raise RefusedError(
            f"an array of {largest:,} bytes; at most {limits.frame_bytes:,} are allowed",
            reason=FRAME_TOO_LARGE,
            fix="send, or ask for, fewer rows at once; cut values that are larger than that",
        )


class TypedDecoder:
    """Decodes headers into one type."""

    def __init__(self, kind: Any) -> None:
        wire, self._restores = wire_type(kind)
        self._kind = kind
        self._decoder = msgspec.msgpack.Decoder(wire, dec_hook=_convert, ext_hook=unpack)

    def decode(self, header: Any, arrays: Sequence[Any]) -> Any:
        """RefusedError when header and arrays are not a value of the type."""
        local_frames.received = arrays
        try:
            value = self._decoder.decode(header)
            return restore(value) if self._restores else value
        except RefusedError:
            raise
        except _UNREADABLE as error:
            if isinstance(error, msgspec.ValidationError):
                said = _FIELD.sub(self._named, str(error))
                raise RefusedError(
                    f"a message of the wrong type: {said}", reason=WRONG_TYPE, fix="give what is expected there"
                ) from error
            raise RefusedError(f"a malformed message: {error}", reason=MALFORMED) from error
        except (TypeError, ValueError) as error:  # a constructor refused the values
            raise RefusedError(
                f"a message of the wrong type: {error}", reason=WRONG_TYPE, fix="give what is expected there"
            ) from error
        finally:
            local_frames.received = ()

    def _named(self, place: re.Match[str]) -> str:
        """The field of a message that travels as an array, and of those in it, where it is one."""
        kind: Any = self._kind
        said = kind.__name__ if getattr(kind, "__struct_fields__", ()) else "$"
        for number in map(int, _NUMBER.findall(place[0])):
            fields = getattr(kind, "__struct_fields__", ())
            if number < len(fields):
                said += f".{fields[number]}"
                kind = get_type_hints(kind)[fields[number]]
            else:
                said, kind = f"{said}[{number}]", None
        return said


_FIELD = re.compile(r"\$(\[\d+\])+")
"""How msgspec says which element of an array is wrong."""
_NUMBER = re.compile(r"\d+")
_decoders: dict[Any, TypedDecoder] = {}


def decoder_for(kind: Any) -> TypedDecoder:
    """The decoder of a type; made once."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = TypedDecoder(kind)
    return decoder


def _convert(kind: type, value: Any) -> Any:
    """msgspec checks afterwards that the result is a ``kind``."""
    if not isinstance(value, dict):
        return value
    values, offsets, places = value.get("values"), value.get("offsets"), value.get("places")
    if kind is ValueOnWire and isinstance(places, np.ndarray):
        shared: Any = _convert(ColumnOnWire, values)
        return Repeated(shared, places) if isinstance(shared, np.ndarray | Ragged) else value
    if kind in (ColumnOnWire, ValueOnWire) and isinstance(values, np.ndarray) and isinstance(offsets, np.ndarray):
        return Ragged(values, offsets)
    return value
