"""Hugging Face model directories: load, save, and fresh weights.

Invariant: a model is loaded completely or not at all; a saved directory is one that ``transformers`` loads.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import EngineError
from headrace_torch.model import Decoder, ModelConfig

_WEIGHTS = "model.safetensors"
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
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    found = {name: t for name, t in _read_tensors(Path(path)).items() if not _derived(name, expected)}
    missing, surplus = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or surplus:
        raise _mismatch(path, f"missing {missing[:5]}, unexpected {surplus[:5]}")
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise _mismatch(path, f"{name} has shape {tuple(found[name].shape)}, expected {tuple(shape)}")
    model.load_state_dict({n: t.to(device=device, dtype=dtype) for n, t in found.items()}, assign=True)
    return model.requires_grad_(True)


def save_model(model: Decoder, path: str, *, like: str | None) -> None:
    """Write a Hugging Face directory to ``path`` (created when missing).

    ``like``: the directory the model came from; its tokenizer and generation files are copied, and
    ``config.json`` keeps the keys that this package does not know. ValueError when that is another model.
    """
    target = Path(path)
    target.mkdir(parents=True, exist_ok=True)
    values = model.config.to_json()
    if like is not None:
        values = _original_config(like, model.config)
        _copy_side_files(Path(like), target)
    dtype = str(model.model.embed_tokens.weight.dtype).removeprefix("torch.")
    values.pop("torch_dtype", None)
    values["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    tensors = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, str(target / _WEIGHTS), metadata={"format": "pt"})


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


def _derived(name: str, expected: dict[str, torch.Size]) -> bool:
    """Tensors that some checkpoints carry though they follow from others."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and name not in expected)


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    try:
        if (directory / _INDEX).exists():
            shards = sorted(set(json.loads((directory / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            shards = [_WEIGHTS]
        tensors: dict[str, Tensor] = {}
        for shard in shards:
            tensors.update(load_file(str(directory / shard)))
        return tensors
    except (OSError, SafetensorError) as error:
        raise EngineError(
            f"weights cannot be read: {error}",
            origin=str(directory),
            fix=f"the directory needs {_WEIGHTS}, or {_INDEX} and the shards it names",
        ) from error


def _original_config(like: str, config: ModelConfig) -> dict[str, Any]:
    if ModelConfig.from_directory(like) != config:
        raise ValueError(f"{like} holds another model than the one to be saved")
    values: dict[str, Any] = json.loads((Path(like) / "config.json").read_text(encoding="utf-8"))
    return values


def _copy_side_files(source: Path, target: Path) -> None:
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
