"""Saving a training state to a directory and restoring it bit for bit.

A save is written beside its place and renamed into it, so that a directory under the final name is always complete.
Tensors are in safetensors files: reading one runs no code. Invariant: what is loaded is exactly what was saved, or
RunError.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import RunError

MANIFEST = "training.json"
_FORMAT = 1
FIX = "resume from another checkpoint; this one is incomplete or was changed"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingState:
    """All that the next optimiser step depends on."""

    model: Mapping[str, Any]
    """Shapes and constants, as in a ``config.json``; a state of another model is refused."""
    optimizer: str
    adapter: Mapping[str, Any] | None
    """Its settings, and the digest of the base that it is for, which the state does not have; None: all is trained."""
    steps: int
    """Optimiser steps applied."""
    weights: Mapping[str, Tensor]
    """float32 masters."""
    optimizer_state: Mapping[str, Tensor]
    random_state: Mapping[str, Tensor]
    """uint8: torch's generator per device."""
    snapshots: Mapping[str, Mapping[str, Tensor]]


def save_state(state: TrainingState, path: str) -> None:
    """Write ``state`` to directory ``path``, replacing an earlier save there."""
    snapshots = {name: f"snapshot-{index}.safetensors" for index, name in enumerate(state.snapshots)}
    manifest = {
        "format": _FORMAT,
        "model": state.model,
        "optimizer": state.optimizer,
        "adapter": state.adapter,
        "steps": state.steps,
        "snapshots": snapshots,
    }
    with new_directory(path, marker=MANIFEST) as directory:
        _write(directory / "weights.safetensors", state.weights)
        _write(directory / "optimizer.safetensors", state.optimizer_state)
        _write(directory / "random.safetensors", state.random_state)
        for name, file in snapshots.items():
            _write(directory / file, state.snapshots[name])
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def load_state(
    path: str, *, model: Mapping[str, Any], optimizer: str, adapter: Mapping[str, Any] | None
) -> TrainingState:
    """Read a save. RunError when a file is missing or unreadable, or it is of another model, optimiser or adapter."""
    directory = Path(path)
    expected = {"format": _FORMAT, "model": model, "optimizer": optimizer, "adapter": adapter}
    manifest = read_manifest(path, expected)
    return TrainingState(
        model=model,
        optimizer=optimizer,
        adapter=adapter,
        steps=int(manifest["steps"]),
        weights=_read(directory / "weights.safetensors"),
        optimizer_state=_read(directory / "optimizer.safetensors"),
        random_state=_read(directory / "random.safetensors"),
        snapshots={name: _read(directory / file) for name, file in manifest["snapshots"].items()},
    )


def read_manifest(path: str, expected: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a save says of itself. RunError when it says nothing, or of a key in ``expected`` something else."""
    try:
        manifest: dict[str, Any] = json.loads((Path(path) / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"no readable {MANIFEST}: {error}", origin=path, fix=FIX) from error
    for key, value in json.loads(json.dumps(expected)).items():
        if manifest.get(key) != value:
            raise RunError(
                f"training state has {key} {manifest.get(key)!r}, expected {value!r}",
                origin=path,
                fix="resume with the job file that the run was started with",
            )
    return manifest


def random_state() -> dict[str, Tensor]:
    """States of torch's global generators."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_state(states: Mapping[str, Tensor]) -> None:
    """Restore what :func:`random_state` gave, on the devices that are here."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def restoring(path: str, restore: Callable[[], None]) -> None:
    """Call ``restore``; its ValueError, about a tensor that is absent or misshapen, becomes a RunError."""
    try:
        restore()
    except ValueError as error:
        raise RunError(f"training state does not fit the model: {error}", origin=path, fix=FIX) from error


@contextmanager
def new_directory(path: str, *, marker: str) -> Iterator[Path]:
    """A directory to fill that becomes ``path`` once complete and on disk.

    What ``path`` held before is replaced if it has a file ``marker``, that is if it is an earlier save; RunError
    protects anything else. OSError when the disk refuses it, and nothing is left then.
    """
    target = Path(path).absolute()
    if target.exists() and not (target / marker).exists() and any(target.iterdir()):
        raise RunError(f"{path} holds something else than a save", origin=path, fix="name a new or empty directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield partial
        for file in partial.iterdir():
            _sync(file)
        _sync(partial)
        if (target / marker).exists():
            _replace(partial, target)
        else:
            partial.rename(target)
        _sync(target.parent)
    except SafetensorError as error:  # whose class says nothing of a full disk, only its words do
        raise OSError(f"{error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(partial: Path, target: Path) -> None:
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    target.rename(old)
    partial.rename(target)
    shutil.rmtree(old)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(file: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, str(file))


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(str(file))
    except (OSError, SafetensorError) as error:
        raise RunError(f"{file.name} cannot be read: {error}", origin=str(file.parent), fix=FIX) from error
