"""Fresh models: a Hugging Face directory with random weights and a character tokenizer, ``transformers`` can load it.

Invariant: token ids are 0 padding, 1 beginning, 2 end, then the alphabet's characters in their order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from headrace_torch.checkpoint import create_weights, save_model
from headrace_torch.model import Decoder, ModelConfig
from headrace_torch.scratch_settings import SPECIAL, ScratchSettings, read

_PAD, _BOS, _EOS = range(len(SPECIAL))
_VOCABULARY_STEP = 64


def create_model(path: str, *, settings: Mapping[str, Any], seed: int) -> None:
    """See :class:`headrace.contract.ScratchModels`."""
    table = read(settings)
    config = _config(table)
    with torch.device("cpu"):
        model = Decoder(config)
    create_weights(model, seed)
    save_model(model, path, like=None)
    directory = Path(path)
    tokenizer = _tokenizer(table.alphabet).to_str(pretty=True)
    (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    _write(directory / "tokenizer_config.json", _tokenizer_config(table))
    _write(directory / "generation_config.json", {"bos_token_id": _BOS, "eos_token_id": _EOS, "pad_token_id": _PAD})


def _config(table: ScratchSettings) -> ModelConfig:
    rounded = -(-table.tokens // _VOCABULARY_STEP) * _VOCABULARY_STEP
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
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate((*SPECIAL, *alphabet))}))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    begin = SPECIAL[_BOS]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, _BOS)]
    )
    return tokenizer


def _tokenizer_config(table: ScratchSettings) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[_PAD],
        "bos_token": SPECIAL[_BOS],
        "eos_token": SPECIAL[_EOS],
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": table.max_length,
    }


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
