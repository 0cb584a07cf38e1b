"""Engines on ranks, what they have, and whether any of their processes is left."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

from headrace.contract import Array, TrainingContext
from headrace.testing.suites.trainees import Trainee
from headrace_fsdp.training import FsdpTrainingEngine
from headrace_torch.training import TorchTrainingEngine
from support.whole_runs import alive

TINY: dict[str, Any] = {
    "architecture": "qwen3",
    "alphabet": "0123456789abcdefghijklmnop=",
    "hidden_size": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "intermediate_size": 48,
    "max_length": 128,
    "tie_embeddings": False,
}
PLAIN: dict[str, Any] = {"learning_rate": 1e-3, "max_gradient_norm": float("inf")}
IMPATIENT: dict[str, Any] = {"rank_deadline": 60.0}


def write_model(path: Path, **settings: Any) -> str:
    """A tiny model with weights so large that its log-probs differ much."""
    from safetensors.torch import load_file, save_file

    TorchTrainingEngine.create_model(str(path), settings={**TINY, **settings}, seed=7)
    file = str(path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: 6 * t if t.ndim == 2 else t + 0.2 * torch.randn(t.shape, generator=generator)
        for name, t in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return str(path)


@contextmanager
def started(model_path: str, *, ranks: int | None, values: bool = False, **settings: Any) -> Iterator[Trainee]:
    """An engine of so many ranks; None: the torch engine. Its ranks are gone at the end."""
    kind = TorchTrainingEngine if ranks is None else FsdpTrainingEngine
    chosen = {**PLAIN, **settings} if ranks is None else {**PLAIN, **IMPATIENT, **settings, "ranks": ranks}
    engine = kind(kind.Settings(**chosen))
    engine.start(
        TrainingContext(name="trainer", model_path=model_path, seed=5, threads=1, total_steps=20, values=values)
    )
    processes = others(engine)
    assert len(processes) == (ranks or 1) - 1
    try:
        yield Trainee(engine, model_path)
    finally:
        engine.close()
    assert alive(processes) == []


def others(engine: Any) -> list[int]:
    """Processes of the ranks above 0."""
    return engine._started._crew.pids if isinstance(engine, FsdpTrainingEngine) else []


def wait_until_gone(processes: list[int]) -> None:
    """The test's own time limit ends a wait that is in vain."""
    while alive(processes):
        os.sched_yield()


def whole_state(path: Path, like: Mapping[str, Array]) -> dict[str, Array]:
    """Tensors of a save, as torch's own reader puts them together. ``like``: names and shapes."""
    found = {name: torch.zeros(array.shape) for name, array in like.items()}
    with warnings.catch_warnings(action="ignore"):  # torch says that it reads on its own, as it is told to
        load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    return {name: tensor.numpy() for name, tensor in found.items()}


def gradient(path: Path, weights: Mapping[str, Array]) -> Array:
    """The flat gradient of the only step before a save: AdamW's first moment is a tenth of it."""
    names = {f"optimizer/{name}/exp_avg": array for name, array in weights.items()}
    moments = whole_state(path, names)
    return np.concatenate([10 * moments[name].ravel().astype(np.float64) for name in names])
