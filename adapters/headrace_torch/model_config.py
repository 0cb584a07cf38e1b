"""Shapes and constants of a decoder model, read from a Hugging Face ``config.json``.

Invariant: a configuration that this package cannot compute exactly is refused here, so that a loaded
model never differs silently from the one its author trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from headrace.errors import EngineError

Architecture = Literal["llama", "qwen2", "qwen3"]

_CLASSES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DEFAULT_HEAD_DIM: dict[str, int] = {"qwen3": 128}
_DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama, Qwen2 or Qwen3 family; field names are Hugging Face's."""

    model_type: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = _DEFAULT_THETA
    rope_scaling: Llama3RopeScaling | None = None
    attention_bias: bool = False
    """Bias of the query, key and value projections."""
    output_bias: bool = False
    """Bias of the attention output projection."""
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads cannot share {self.num_key_value_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"rotary position embedding needs an even head_dim, got {self.head_dim}")

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head before rotation."""
        return self.model_type == "qwen3"

    @classmethod
    def from_directory(cls, path: str) -> ModelConfig:
        """Read ``path/config.json``. EngineError when it is missing or of a model that is not supported."""
        file = Path(path) / "config.json"
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EngineError(
                f"no readable config.json: {error}", origin=str(file), fix="give a Hugging Face model directory"
            ) from error
        return cls.from_json(values, origin=str(file))

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, origin: str = "config.json") -> ModelConfig:
        """Interpret the content of a ``config.json``; ``origin`` is named in errors."""
        model_type = values.get("model_type")
        if model_type not in _CLASSES:
            raise _unsupported(f"model_type {model_type!r}; supported: {', '.join(_CLASSES)}", origin)
        _refuse_unsupported(values, origin)
        theta, scaling = _rope(values, origin)
        bias = model_type == "qwen2" or bool(values.get("attention_bias", False))
        eos = values.get("eos_token_id")
        try:
            heads = int(values["num_attention_heads"])
            return cls(
                model_type=cast(Architecture, model_type),
                vocab_size=int(values["vocab_size"]),
                hidden_size=int(values["hidden_size"]),
                intermediate_size=int(values["intermediate_size"]),
                num_hidden_layers=int(values["num_hidden_layers"]),
                num_attention_heads=heads,
                num_key_value_heads=int(values.get("num_key_value_heads") or heads),
                head_dim=int(
                    values.get("head_dim") or _DEFAULT_HEAD_DIM.get(model_type, int(values["hidden_size"]) // heads)
                ),
                max_position_embeddings=int(values["max_position_embeddings"]),
                rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
                rope_theta=theta,
                rope_scaling=scaling,
                attention_bias=bias,
                output_bias=bias and model_type != "qwen2",
                mlp_bias=bool(values.get("mlp_bias", False)),
                tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
                bos_token_id=values.get("bos_token_id"),
                eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
                pad_token_id=values.get("pad_token_id"),
            )
        except KeyError as error:
            raise EngineError(f"config.json lacks {error}", origin=origin, fix="restore the model's own file") from None
        except (TypeError, ValueError) as error:
            raise _unsupported(str(error), origin) from error

    def to_json(self) -> dict[str, Any]:
        """Content of a ``config.json`` that both current and older transformers read alike."""
        rope: dict[str, Any] = {"rope_type": "default"}
        if self.rope_scaling is not None:
            s = self.rope_scaling
            rope = {
                "rope_type": "llama3",
                "factor": s.factor,
                "low_freq_factor": s.low_freq_factor,
                "high_freq_factor": s.high_freq_factor,
                "original_max_position_embeddings": s.original_max_position_embeddings,
            }
        values: dict[str, Any] = {
            "architectures": [_CLASSES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else rope,
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "attention_bias": self.attention_bias,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_id) if isinstance(self.eos_token_id, tuple) else self.eos_token_id,
            "pad_token_id": self.pad_token_id,
        }
        if self.model_type == "llama":
            values["mlp_bias"] = self.mlp_bias
        return values


def _refuse_unsupported(values: Mapping[str, Any], origin: str) -> None:
    if values.get("hidden_act", "silu") != "silu":
        raise _unsupported(f"activation {values['hidden_act']!r}; supported: 'silu'", origin)
    layer_types = set(values.get("layer_types") or ()) - {"full_attention"}
    if values.get("use_sliding_window") or layer_types:
        raise _unsupported("sliding-window attention", origin)
    if values.get("quantization_config"):
        raise _unsupported("quantised weights", origin)


def _rope(values: Mapping[str, Any], origin: str) -> tuple[float, Llama3RopeScaling | None]:
    """Transformers 5 keeps everything in ``rope_parameters``; before, ``rope_theta`` stood beside ``rope_scaling``,
    whose type was once called ``type``."""
    rope: dict[str, Any] = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or values.get("rope_theta") or _DEFAULT_THETA)
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise _unsupported(f"partial_rotary_factor {partial}", origin)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise _unsupported(f"rope type {kind!r}; supported: 'default', 'llama3'", origin)
    try:
        return theta, Llama3RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(
                rope.get("original_max_position_embeddings") or values["max_position_embeddings"]
            ),
        )
    except KeyError as error:
        raise EngineError(f"rope scaling lacks {error}", origin=origin, fix="restore the model's own file") from None


def _unsupported(what: str, origin: str) -> EngineError:
    return EngineError(
        f"not supported by headrace_torch: {what}",
        origin=origin,
        fix="choose a Llama, Qwen2 or Qwen3 model without it, or another engine",
    )
