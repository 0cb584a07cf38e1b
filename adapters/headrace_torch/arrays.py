"""The same memory as a torch tensor and as a numpy array. The two share no narrow floats: the bits pass as integers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
import xxhash
from torch import Tensor

from headrace.contract.columns import Array


def as_numpy(tensor: Tensor) -> Array:
    """A view of a CPU tensor; bfloat16 by ``ml_dtypes``."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = tensor.numpy()
    return array


def as_tensor(array: Array) -> Tensor:
    """A view of an array that may be written to."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype.name == "float8_e4m3fn":
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(array)


def checksum(array: Array) -> str:
    """xxh3-128 of the bytes in C order, hexadecimal (:class:`~headrace.contract.weights.TensorInfo`)."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
