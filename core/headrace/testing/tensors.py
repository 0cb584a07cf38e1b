"""Weight files of a Hugging Face directory, in numpy alone.

The safetensors format (https://huggingface.co/docs/safetensors): 8 bytes with the header's length, a JSON header with
each tensor's dtype, shape and place, then the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from headrace.contract import Array

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_tensors(directory: str | Path) -> dict[str, Array]:
    """Every tensor of every ``*.safetensors`` file of a directory, by name. KeyError for a dtype not in DTYPES."""
    found: dict[str, Array] = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = (start + offset for offset in entry["data_offsets"])
                found[name] = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"]).copy()
    return found


def write_tensors(file: str | Path, tensors: Mapping[str, Array]) -> None:
    """One safetensors file."""
    header: dict[str, object] = {}
    place = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.nbytes],
        }
        place += tensor.nbytes
    text = json.dumps(header).encode()
    Path(file).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(t.tobytes() for t in tensors.values()))
