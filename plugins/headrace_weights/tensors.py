"""What every transport does with tensors: gather a source's into a manifest, and give bytes their dtype and shape.

Invariant: a tensor that :func:`typed` gives has the manifest's checksum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import ml_dtypes  # noqa: F401  # numpy knows bfloat16 and float8 by name then
import numpy as np

from headrace.contract import Array, TensorInfo, WeightManifest, WeightSource
from headrace.errors import ContractError, WireError
from headrace.wire import manifest_digest, tensor_checksum

_ALIGNMENT = 64
"""Suits every dtype, and a cache line."""


def gather(version: int, source: WeightSource, keep: Callable[[str, Array], TensorInfo]) -> WeightManifest:
    """The manifest of what ``source`` has now. ``keep``: copies a tensor and describes it. ContractError for a name
    that comes twice."""
    return manifest_of(version, [keep(name, np.asarray(tensor)) for name, tensor in source.tensors()])


def manifest_of(version: int, infos: Sequence[TensorInfo]) -> WeightManifest:
    """Of all of a version's tensors. ContractError for a name that comes twice."""
    twice = [name for name, count in Counter(info.name for info in infos).items() if count > 1]
    if twice:
        raise ContractError(
            f"the weight source of version {version} gave {twice} more than once", fix="give tied tensors once"
        )
    return WeightManifest(
        version=version, tensors=tuple(infos), nbytes=sum(map(nbytes_of, infos)), digest=manifest_digest(infos)
    )


def published_before(version: int) -> ContractError:
    """A version is published once."""
    return ContractError(f"version {version} was published before", fix="publish every version once")


def checked_manifest(manifest: WeightManifest, version: int, address: str) -> WeightManifest:
    """The manifest that was asked for. WireError when it is another one, or contradicts itself."""
    if manifest_digest(manifest.tensors) != manifest.digest or manifest.version != version:
        raise WireError(f"the manifest of version {version} from {address} contradicts its own digest")
    return manifest


def dtype_of(info: TensorInfo) -> np.dtype[Any]:
    """WireError for one that numpy does not know here."""
    try:
        return np.dtype(info.dtype)
    except TypeError as error:
        raise WireError(f"tensor {info.name} has dtype {info.dtype!r}, which this node does not know") from error


def nbytes_of(info: TensorInfo) -> int:
    """Of the tensor's values."""
    return prod(info.shape) * dtype_of(info).itemsize


def aligned(nbytes: int) -> int:
    """Where the next tensor begins, when all lie one behind the other."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def places(manifest: WeightManifest) -> Iterator[tuple[TensorInfo, int, int]]:
    """Each tensor, where it begins when all lie one behind the other, and where it ends."""
    start = 0
    for info in manifest.tensors:
        stop = start + nbytes_of(info)
        yield info, start, stop
        start = aligned(stop)


def typed(info: TensorInfo, data: Array, what: str) -> Array:
    """``data`` (uint8, all of the tensor's bytes) as the tensor: a view where it is aligned. ``what``: for errors.
    WireError when it does not have the manifest's checksum."""
    tensor: Array = data.view(dtype_of(info)).reshape(info.shape)
    if not tensor.flags.aligned:
        tensor = tensor.copy()
    if tensor_checksum(tensor) != info.checksum:
        raise WireError(f"{what}: its bytes do not have the manifest's checksum {info.checksum}")
    return tensor
