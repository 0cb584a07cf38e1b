"""What of a tensor differs from the same tensor of an earlier version, exactly.

An optimiser step changes every weight a little: of a bfloat16 often no bit, of a float32 the bits of least weight. So
the items' bytes are compared plane by plane, all first bytes, all second bytes and so on, and of each plane the
smallest of three is kept: the bytes that changed with the gaps between them, the same with a bit for every byte that
says whether it changed, or the whole plane. A plane that is the same in both is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.contract import Array
from headrace.errors import WireError
from headrace_weights.disk.files import FileReader

_GAPS: dict[str, str] = {"U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64"}
_SAMPLED = 4096
_MOST = 0.75
"""Share of changed bytes from which on a plane is kept whole without a closer look: with a bit for each byte it would
have seven eighths of its size."""


def encode(number: int, new: Array, old: Array, width: int) -> Iterator[tuple[str, Array]]:
    """Name and array of each part of tensor ``number``. ``new`` and ``old``: its bytes (uint8) in both versions;
    ``width``: bytes of an item."""
    parts: list[tuple[str, Array]] = []
    planes, earlier = new.reshape(-1, width), old.reshape(-1, width)
    for index in range(width):
        parts += _plane(f"{number}.{index}", planes[:, index], earlier[:, index])
    if sum(part.nbytes for _, part in parts) < new.nbytes:
        yield from parts
    else:
        yield f"{number}.whole", new


def apply(file: FileReader, number: int, data: Array, width: int) -> None:
    """Make of ``data`` (uint8), a tensor's bytes in the earlier version, those of the version that ``file`` tells of.
    WireError for parts that cannot be of this tensor."""
    planes = data.reshape(-1, width)
    for index in range(width):
        name, plane = f"{number}.{index}", planes[:, index]
        try:
            if f"{name}.whole" in file:
                plane[:] = file.array(f"{name}.whole", "uint8")
            elif f"{name}.bits" in file:
                bits = np.unpackbits(file.array(f"{name}.bits", "uint8"), count=len(plane))
                plane[bits.view(bool)] = file.array(f"{name}.bytes", "uint8")
            elif f"{name}.gaps" in file:
                gaps = file.array(f"{name}.gaps", _GAPS[file.kind(f"{name}.gaps")])
                plane[_positions(gaps)] = file.array(f"{name}.bytes", "uint8")
        except (ValueError, IndexError, KeyError) as error:
            raise WireError(f"{file.path} tells of tensor {number} what cannot be: {error}") from error


def _plane(name: str, new: Array, old: Array) -> Iterator[tuple[str, Array]]:
    if _mostly_changed(new, old):
        yield f"{name}.whole", np.ascontiguousarray(new)
        return
    changed = new != old
    places = np.flatnonzero(changed)
    if not len(places):
        return
    gaps = _gaps(places)
    if len(places) + min(gaps.nbytes, len(new) // 8) >= len(new):
        yield f"{name}.whole", np.ascontiguousarray(new)
        return
    if gaps.nbytes <= len(new) // 8:
        yield f"{name}.gaps", gaps
    else:
        yield f"{name}.bits", np.packbits(changed)
    yield f"{name}.bytes", new[places]


def _mostly_changed(new: Array, old: Array) -> bool:
    if not len(new):
        return False
    step = -(-len(new) // _SAMPLED)
    return bool(np.mean(new[::step] != old[::step]) > _MOST)


def _gaps(places: Array) -> Array:
    """How many bytes lie between each place and the one before it, in as few bytes as they fit."""
    gaps = np.diff(places, prepend=-1) - 1
    dtype: np.dtype[Any] = np.min_scalar_type(gaps.max())
    packed: Array = gaps.astype(dtype)
    return packed


def _positions(gaps: Array) -> Array:
    places: Array = np.cumsum(gaps.astype(np.int64) + 1) - 1
    return places
