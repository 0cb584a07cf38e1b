"""A training state on disk: Megatron's ``dist_checkpointing``, which any number of ranks reads.

Invariant: a state is read whole into fresh memory before anything is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_megatron.engine import ShardedTensor, dist_checkpointing, nested_values
from headrace_megatron.optimizer import MegatronUpdater

FORMAT = "megatron-1"
_SHARDING = {
    "distrib_optim_sharding_type": "fully_reshardable",  # the default cannot be written, and another is not exact
    "distrib_optim_fully_reshardable_mem_efficient": True,  # gathered over gloo, on one data-parallel rank
}


def write(path: str, network: Any, updater: MegatronUpdater, snapshots: Mapping[str, Any]) -> None:
    """Collective. ``snapshots``: networks by the prefix of their names."""
    updater.make_state()
    dist_checkpointing.save(_state(network, updater, snapshots, loading=False), path)


def read(path: str, network: Any, updater: MegatronUpdater, snapshots: Mapping[str, Any]) -> None:
    """Collective. Fills all of them."""
    updater.make_state()
    state = _state(network, updater, snapshots, loading=True)
    for part in (state["model"], *(state[prefix] for prefix in snapshots)):
        for sharded in nested_values(part):
            if isinstance(sharded, ShardedTensor):
                sharded.data = torch.empty_like(sharded.data)
    found = dist_checkpointing.load(state, path)
    network.load_state_dict(found["model"])
    updater.optimizer.load_state_dict(found["optimizer"])
    for prefix, snapshot in snapshots.items():
        snapshot.load_state_dict({name.removeprefix(f"{prefix}."): tensor for name, tensor in found[prefix].items()})


def _state(network: Any, updater: MegatronUpdater, snapshots: Mapping[str, Any], *, loading: bool) -> dict[str, Any]:
    model = network.sharded_state_dict()
    return {
        "model": model,
        "optimizer": updater.optimizer.sharded_state_dict(model, is_loading=loading, metadata=dict(_SHARDING)),
        **{prefix: each.sharded_state_dict(prefix=f"{prefix}.") for prefix, each in snapshots.items()},
    }


def _random_file(path: str, rank: int) -> Path:
    return Path(path) / f"random-{rank}.safetensors"


def write_random(path: str, rank: int, states: Mapping[str, Tensor]) -> None:
    """This rank's generators."""
    save_file(dict(states), str(_random_file(path, rank)))


def read_random(path: str, rank: int) -> dict[str, Tensor]:
    """What :func:`write_random` wrote; nothing of a rank that was not there."""
    file = _random_file(path, rank)
    return load_file(str(file)) if file.exists() else {}
