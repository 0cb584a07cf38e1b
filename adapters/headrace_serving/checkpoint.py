"""What a Hugging Face-format directory says of the model in it: its size and its tensors, without their values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Read from ``config.json`` and the headers of ``*.safetensors``."""

    vocabulary: int
    context: int
    """Tokens of the longest sequence."""
    shapes: dict[str, tuple[int, ...]]
    """Of every tensor, by name; of tied ones the embedding alone."""
    optional: frozenset[str]
    """Tensors that may be there as well, and that engines do not load: the output head where it is the embedding."""


_HEAD = "lm_head.weight"


def read_checkpoint(path: str) -> Checkpoint:
    """EngineError when something is missing."""
    folder = Path(path)
    try:
        config = json.loads((folder / "config.json").read_text())
        text = config.get("text_config", config)
        tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
        shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            shapes |= _shapes(file)
        if tied:
            shapes.pop(_HEAD, None)
        if not shapes:
            raise EngineError(f"{path} has no *.safetensors", fix="give a model in Hugging Face's safetensors format")
        return Checkpoint(
            vocabulary=text["vocab_size"],
            context=text["max_position_embeddings"],
            shapes=shapes,
            optional=frozenset({_HEAD}) if tied else frozenset(),
        )
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(
            f"{path} is no model in Hugging Face's format: {error!r}",
            fix="give a directory with config.json and *.safetensors",
        ) from error


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """A safetensors file begins with the length of its header, 8 bytes, and the header, JSON
    (https://huggingface.co/docs/safetensors)."""
    with file.open("rb") as opened:
        header: dict[str, Any] = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
