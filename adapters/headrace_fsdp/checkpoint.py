"""A training state on disk: torch.distributed.checkpoint's, in its safetensors form.

Each rank writes the parts it has, with where they belong in the whole, and reads the parts it needs, which may lie in
files of any number of ranks. The plans are made by each rank on its own, and the files say all that a plan needs, so
that neither reading nor writing passes a pickle. Invariant: a state is read whole into fresh memory, or refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from headrace.errors import RunError
from headrace_fsdp.network import local
from headrace_torch.trainer.resume import FIX

FORMAT = "fsdp-1"


def write_parts(tensors: Mapping[str, Tensor], path: str, *, rank: int) -> None:
    """Write this rank's parts of ``tensors`` into a file of its own in ``path``; plain tensors are written whole, so
    give each on one rank only. OSError when the disk refuses it."""
    state: dict[str, Any] = _here(tensors)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    writer = HuggingFaceStorageWriter(path, save_distributed=True)
    plan = dataclasses.replace(planner.create_local_plan(), storage_data={"shard_index": rank + 1})
    try:
        writer.write_data(planner.finish_plan(plan), planner).wait()
    except SafetensorError as error:  # whose class says nothing of a full disk, only its words do
        raise OSError(f"{error}") from error


def read_parts(tensors: Mapping[str, Tensor], path: str) -> None:
    """Fill this rank's parts of ``tensors``. RunError when one is absent or of another shape."""
    state: dict[str, Any] = _here(tensors)
    reader = HuggingFaceStorageReader(path)
    try:
        metadata = reader.read_metadata()
        stored = metadata.state_dict_metadata
        for name, tensor in state.items():
            if name not in stored:
                raise RunError(f"{name} is missing", origin=path, fix=FIX)
            if (size := tuple(getattr(stored[name], "size", ()))) != tuple(tensor.shape):
                raise RunError(f"{name} has shape {size}, expected {tuple(tensor.shape)}", origin=path, fix=FIX)
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise RunError(f"training state cannot be read: {error}", origin=path, fix=FIX) from error


def stored_names(path: str) -> set[str]:
    """What tensors there are. RunError when that cannot be read."""
    try:
        return set(HuggingFaceStorageReader(path).read_metadata().state_dict_metadata)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise RunError(f"training state cannot be read: {error}", origin=path, fix=FIX) from error


def _here(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without those of which this rank has nothing."""
    return {name: tensor for name, tensor in tensors.items() if local(tensor).numel()}
