"""The tensors of a new version in memory that an engine's processes can map, until they are loaded.

What lies there is a weight file in the safetensors format (https://huggingface.co/docs/safetensors): 8 bytes with the
length of the header, the header, JSON, then the tensors, one after the other.

Invariant: what is handed to an engine is whole, has the manifest's checksums, and is exactly what the model is made of.
Engines leave a layer as it was when its tensors are missing, and do not check what they are given.
"""

from __future__ import annotations

import json
import mmap
import os
from typing import Any

import ml_dtypes  # noqa: F401  # numpy knows bfloat16 and float8 by name then
import numpy as np
import xxhash

from headrace.contract.columns import Array
from headrace.contract.weights import TensorInfo, WeightManifest
from headrace_serving.checkpoint import Checkpoint

FORMAT_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_ALIGNMENT = 64
"""Of the first tensor. Those of wider numbers lie before others, and so each is aligned as its numbers are."""
_SHOWN = 5


class StagedWeights:
    """One version in the making. Used by one thread at a time. Its memory has no name: it is gone with this process,
    however that ends."""

    def __init__(self, manifest: WeightManifest, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._infos = {info.name: info for info in manifest.tensors}
        self._places: dict[str, int] = {}
        header, size = _header(manifest)
        begin = len(header)
        for info in _in_order(manifest):
            self._places[info.name] = begin
            begin += _nbytes(info)
        self._size = len(header) + size
        self._file = os.memfd_create(f"headrace version {manifest.version}")
        os.ftruncate(self._file, self._size)
        self._memory = mmap.mmap(self._file, self._size)
        self._memory[: len(header)] = header
        self._staged: set[str] = set()
        self._faults: dict[str, str] = {}

    @property
    def path(self) -> str:
        """Of the weight file, for every process of this user on this machine."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def put(self, name: str, tensor: Array) -> None:
        """Copy one tensor. What is wrong with it is told by :meth:`problems`; putting it again, right, mends that."""
        fault = self._fault(name, tensor)
        if fault is not None:
            self._faults[name] = fault
            self._staged.discard(name)
            return
        self._bytes(self._infos[name])[:] = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        self._faults.pop(name, None)
        self._staged.add(name)

    def problems(self) -> list[str]:
        """Everything that keeps this version from being served, checksums of what lies in the memory included; empty
        when it is complete."""
        problems = [f"{name}: {fault}" for name, fault in self._faults.items()]
        known, shapes = self._infos.keys(), self._checkpoint.shapes.keys()
        for what, names in (
            ("the model has no", known - shapes - self._checkpoint.optional),
            ("the manifest lacks", shapes - known),
            ("never arrived:", known - self._staged - self._faults.keys()),
            ("the checksum is wrong of", {name for name in self._staged if not self._intact(self._infos[name])}),
        ):
            if names:
                shown = sorted(names)
                problems.append(f"{what} {', '.join(shown[:_SHOWN])}" + (" …" if len(shown) > _SHOWN else ""))
        return problems

    def update_info(self) -> dict[str, Any]:
        """For processes that map the memory themselves: ``path``, ``nbytes``, and of all ``tensors`` name, dtype, shape
        and first byte."""
        return {
            "path": self.path,
            "nbytes": self._size,
            "tensors": [
                [info.name, info.dtype, list(info.shape), self._places[info.name]] for info in self._infos.values()
            ],
        }

    def close(self) -> None:
        """Free the memory; may be called twice."""
        if self._file >= 0:
            self._memory.close()
            os.close(self._file)
            self._file = -1

    def _bytes(self, info: TensorInfo) -> Array:
        return np.frombuffer(self._memory, np.uint8, count=_nbytes(info), offset=self._places[info.name])

    def _intact(self, info: TensorInfo) -> bool:
        return xxhash.xxh3_128_hexdigest(self._bytes(info).data) == info.checksum

    def _fault(self, name: str, tensor: Array) -> str | None:
        info = self._infos.get(name)
        if info is None:
            return "not in the manifest"
        if tensor.dtype.name != info.dtype:
            return f"dtype {tensor.dtype.name}, the manifest says {info.dtype}"
        if info.dtype not in FORMAT_DTYPES:
            return f"dtype {info.dtype}, which weight files do not have"
        shape = self._checkpoint.shapes.get(name, info.shape)
        if tensor.shape != info.shape or info.shape != shape:
            return f"shape {tensor.shape}, manifest {info.shape}, model {shape}"
        return None


def _in_order(manifest: WeightManifest) -> list[TensorInfo]:
    return sorted(manifest.tensors, key=lambda info: -np.dtype(info.dtype).itemsize)


def _header(manifest: WeightManifest) -> tuple[bytes, int]:
    """What the weight file begins with, and how many bytes of tensors follow."""
    entries: dict[str, Any] = {}
    end = 0
    for info in _in_order(manifest):
        begin, end = end, end + _nbytes(info)
        kind = FORMAT_DTYPES.get(info.dtype, info.dtype)
        entries[info.name] = {"dtype": kind, "shape": list(info.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, end


def _nbytes(info: TensorInfo) -> int:
    count = 1
    for extent in info.shape:
        count *= extent
    return count * np.dtype(info.dtype).itemsize
