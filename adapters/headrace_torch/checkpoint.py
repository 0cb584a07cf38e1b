"""Hugging Face model directories: load, save, and fresh weights.

Invariant: a model is loaded completely or not at all; a saved directory is one that ``transformers`` loads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace.errors import EngineError
from headrace_torch.model import Decoder, ModelConfig

WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)
_INITIAL_DEVIATION = 0.02


def load_model(path: str, *, dtype: torch.dtype, device: str) -> Decoder:
    """The model of a Hugging Face directory, cast to ``dtype``, on ``device``.

    EngineError when the directory has no safetensors weights, or they are not exactly the tensors that its
    ``config.json`` describes.
    """
    config = ModelConfig.from_directory(path)
    with torch.device("meta"):
        model = Decoder(config)
    with stored_tensors(path, {name: p.shape for name, p in model.named_parameters()}) as stored:
        model.load_state_dict({n: t[:].to(device=device, dtype=dtype) for n, t in stored.items()}, assign=True)
    return model.requires_grad_(True)


class StoredTensor(Protocol):
    """A tensor in a file, of which a slice can be read without the rest."""

    def get_shape(self) -> list[int]:
        """Lengths of its dimensions."""

    def __getitem__(self, index: slice) -> Tensor: ...


@contextmanager
def stored_tensors(path: str, expected: Mapping[str, torch.Size]) -> Iterator[Mapping[str, StoredTensor]]:
    """The tensors of a Hugging Face directory, of which nothing is read yet. EngineError when there are none, or they
    are not exactly these, or cannot be read."""
    directory = Path(path)
    with ExitStack() as files:
        try:
            found: dict[str, StoredTensor] = {}
            for shard in _shards(directory):
                file = files.enter_context(safe_open(str(directory / shard), framework="pt"))
                found |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # it is no dictionary
            yield _fitting(path, found, expected)
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"weights cannot be read: {error}",
                origin=path,
                fix=f"the directory needs {WEIGHTS}, or {_INDEX} and the shards it names",
            ) from error


def _fitting(
    path: str, found: Mapping[str, StoredTensor], expected: Mapping[str, torch.Size]
) -> Mapping[str, StoredTensor]:
    found = {name: tensor for name, tensor in found.items() if not _derived(name, expected)}
    missing, surplus = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or surplus:
        raise _mismatch(path, f"missing {missing[:5]}, unexpected {surplus[:5]}")
    for name, shape in expected.items():
        if tuple(found[name].get_shape()) != tuple(shape):
            raise _mismatch(path, f"{name} has shape {tuple(found[name].get_shape())}, expected {tuple(shape)}")
    return found


def save_model(model: Decoder, path: str, *, like: str | None) -> None:
    """Write a Hugging Face directory to ``path`` (created when missing).

    ``like``: the directory the model came from; its tokenizer and generation files are copied, and
    ``config.json`` keeps the keys that this package does not know. ValueError when that is another model, OSError when
    the disk refuses it.
    """
    target = Path(path)
    target.mkdir(parents=True, exist_ok=True)
    dtype = str(model.model.embed_tokens.weight.dtype).removeprefix("torch.")
    write_side_files(target, model.config, dtype=dtype, like=like)
    tensors = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    try:
        save_file(tensors, str(target / WEIGHTS), metadata={"format": "pt"})
    except SafetensorError as error:  # whose class says nothing of a full disk, only its words do
        raise OSError(f"{error}") from error


def write_side_files(target: Path, config: ModelConfig, *, dtype: str, like: str | None) -> None:
    """All of a Hugging Face directory but the weights, as :func:`save_model` does."""
    values = config.to_json()
    if like is not None:
        values = _original_config(like, config)
        copy_side_files(Path(like), target)
    values.pop("torch_dtype", None)
    values["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def create_weights(model: Decoder, seed: int) -> None:
    """Draw fresh weights: normal(0, 0.02) for matrices, 0 for biases, 1 for norms.

    The same seed gives the same weights on every device, and the global random state is not used.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                drawn = torch.empty(parameter.shape, dtype=torch.float32)
                parameter.copy_(drawn.normal_(0.0, _INITIAL_DEVIATION, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)


def _derived(name: str, expected: Mapping[str, torch.Size]) -> bool:
    """Tensors that some checkpoints carry though they follow from others."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and name not in expected)


def _shards(directory: Path) -> list[str]:
    if not (directory / _INDEX).exists():
        return [WEIGHTS]
    return sorted(set(json.loads((directory / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))


def _original_config(like: str, config: ModelConfig) -> dict[str, Any]:
    if ModelConfig.from_directory(like) != config:
        raise ValueError(f"{like} holds another model than the one to be saved")
    values: dict[str, Any] = json.loads((Path(like) / "config.json").read_text(encoding="utf-8"))
    return values


def copy_side_files(source: Path, target: Path) -> None:
    """What a Hugging Face directory has beside weights and ``config.json``: tokenizer and generation settings."""
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def _mismatch(path: str, what: str) -> EngineError:
    return EngineError(
        f"weights do not fit config.json: {what}",
        origin=path,
        fix="restore the model directory; it mixes files of different models",
    )
