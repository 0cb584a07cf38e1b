"""Fresh models: a Hugging Face directory with random weights and a character tokenizer, ``transformers`` can load it.

Invariant: token ids are 0 padding, 1 beginning, 2 end, then the alphabet's characters in their order.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from headrace.errors import ConfigError
from headrace_torch.checkpoint import create_weights, save_model
from headrace_torch.model import Decoder, ModelConfig
from headrace_torch.model_config import Architecture

_ORIGIN = "[model.scratch]"
_SPECIAL = ("<pad>", "<bos>", "<eos>")
_PAD, _BOS, _EOS = range(len(_SPECIAL))
_VOCABULARY_STEP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchSettings:
    """The table ``[model.scratch]``."""

    architecture: Architecture
    alphabet: str
    """The characters the model can read and write, each once."""
    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    max_length: int
    """Tokens of the longest sequence."""
    kv_heads: int | None = None
    """Key-value heads, shared by groups of heads; default: as many as ``heads``."""
    vocabulary_size: int | None = None
    """Default: what special tokens and alphabet need, rounded up to a multiple of 64."""
    tie_embeddings: bool = True
    """Whether the output head is the embedding."""


def create_model(path: str, *, settings: Mapping[str, Any], seed: int) -> None:
    """See :class:`headrace.contract.ScratchModels`."""
    table = _read(settings)
    config = _config(table)
    with torch.device("cpu"):
        model = Decoder(config)
    create_weights(model, seed)
    save_model(model, path, like=None)
    directory = Path(path)
    _tokenizer(table.alphabet).save(str(directory / "tokenizer.json"))
    _write(directory / "tokenizer_config.json", _tokenizer_config(table))
    _write(directory / "generation_config.json", {"bos_token_id": _BOS, "eos_token_id": _EOS, "pad_token_id": _PAD})


def _read(settings: Mapping[str, Any]) -> ScratchSettings:
    fields = {field.name: field for field in dataclasses.fields(ScratchSettings)}
    for name in settings:
        if name not in fields:
            meant = difflib.get_close_matches(name, fields, n=1)
            hint = f". Did you mean {meant[0]!r}?" if meant else ""
            raise _wrong(f"unknown setting {name!r}; known: {', '.join(fields)}{hint}", "rename or remove it")
    for name, field in fields.items():
        if name in settings:
            _check_type(name, str(field.type), settings[name])
        elif field.default is dataclasses.MISSING:
            raise _wrong(f"{name} is missing", f"add {name} = ...")
    table = ScratchSettings(**settings)
    _check_values(table)
    return table


def _check_type(name: str, annotation: str, value: object) -> None:
    expected: type = {"bool": bool, "str": str, "Architecture": str}.get(annotation, int)
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is int):
        raise _wrong(f"{name} is {value!r}, expected a value of type {expected.__name__}", f"correct {name}")


def _check_values(table: ScratchSettings) -> None:
    if table.architecture not in get_args(Architecture):
        meant = difflib.get_close_matches(table.architecture, get_args(Architecture), n=1)
        hint = f". Did you mean {meant[0]!r}?" if meant else ""
        known = ", ".join(get_args(Architecture))
        raise _wrong(f"unknown architecture {table.architecture!r}; known: {known}{hint}", "choose one of them")
    for name in ("hidden_size", "layers", "heads", "intermediate_size", "max_length", "kv_heads"):
        value = getattr(table, name)
        if value is not None and value < 1:
            raise _wrong(f"{name} is {value}, expected at least 1", f"raise {name}")
    repeated = sorted({c for c in table.alphabet if table.alphabet.count(c) > 1})
    if repeated or not table.alphabet:
        found = f"repeats {', '.join(map(repr, repeated))}" if repeated else "is empty"
        raise _wrong(f"alphabet {found}", "list every character once")
    if table.hidden_size % (2 * table.heads):
        raise _wrong(
            f"hidden_size {table.hidden_size} is not an even number for each of {table.heads} heads",
            f"make hidden_size a multiple of {2 * table.heads}",
        )
    if table.kv_heads is not None and table.heads % table.kv_heads:
        raise _wrong(f"{table.heads} heads cannot share {table.kv_heads} kv_heads", "let kv_heads divide heads")
    needed = len(_SPECIAL) + len(table.alphabet)
    if table.vocabulary_size is not None and table.vocabulary_size < needed:
        raise _wrong(
            f"vocabulary_size is {table.vocabulary_size}; special tokens and alphabet need {needed}",
            "raise it, or leave it out",
        )


def _config(table: ScratchSettings) -> ModelConfig:
    needed = len(_SPECIAL) + len(table.alphabet)
    rounded = -(-needed // _VOCABULARY_STEP) * _VOCABULARY_STEP
    return ModelConfig(
        model_type=table.architecture,
        vocab_size=table.vocabulary_size or rounded,
        hidden_size=table.hidden_size,
        intermediate_size=table.intermediate_size,
        num_hidden_layers=table.layers,
        num_attention_heads=table.heads,
        num_key_value_heads=table.kv_heads or table.heads,
        head_dim=table.hidden_size // table.heads,
        max_position_embeddings=table.max_length,
        attention_bias=table.architecture == "qwen2",
        tie_word_embeddings=table.tie_embeddings,
        bos_token_id=_BOS,
        eos_token_id=_EOS,
        pad_token_id=_PAD,
    )


def _tokenizer(alphabet: str) -> Tokenizer:
    """One token per character; a text is begun with BOS; decoding joins without spaces."""
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate((*_SPECIAL, *alphabet))}))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(list(_SPECIAL))
    begin = _SPECIAL[_BOS]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, _BOS)]
    )
    return tokenizer


def _tokenizer_config(table: ScratchSettings) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": _SPECIAL[_PAD],
        "bos_token": _SPECIAL[_BOS],
        "eos_token": _SPECIAL[_EOS],
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": table.max_length,
    }


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _wrong(what: str, fix: str) -> ConfigError:
    return ConfigError(what, origin=_ORIGIN, fix=fix)
