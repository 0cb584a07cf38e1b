"""Model directories with tokenizers, made here, and a session that answers from a list."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from headrace.contract import Array, Completion, EnvironmentContext, FinishReason, VersionSpan

SPECIAL = ["<pad>", "<bos>", "<eos>"]
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz=+-*/ ()."

ModelMaker = Callable[..., Path]


def character_tokenizer(alphabet: str) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def write_model(path: Path, tokenizer: Tokenizer, *, settings: object = None, generation: object = None) -> Path:
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings or {"eos_token": "<eos>"}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A character model without a BOS: digit d has id 3 + d."""
    return write_model(tmp_path / "model", character_tokenizer(ALPHABET))


@pytest.fixture
def context(model: Path, tmp_path: Path) -> EnvironmentContext:
    return EnvironmentContext(model_path=str(model), seed=7, directory=str(tmp_path))


class ListedSession:
    """Answers every call with the same tokens, at version 5, and remembers what it was asked."""

    def __init__(self, tokens: list[int], finish_reason: FinishReason = "stop") -> None:
        self.tokens, self.finish_reason = tokens, finish_reason
        self.prompts: list[Array] = []
        self.stops: list[tuple[int, ...]] = []

    async def generate(
        self, prompt: Array, *, stop_token_ids: tuple[int, ...] = (), max_new_tokens: int | None = None
    ) -> Completion:
        self.prompts.append(prompt)
        self.stops.append(stop_token_ids)
        count = len(self.tokens)
        return Completion(
            token_ids=np.array(self.tokens, dtype=np.int32),
            logprobs=-np.arange(1, count + 1, dtype=np.float32),
            spans=(VersionSpan(version=5, start=0, stop=count),) if count else (),
            finish_reason=self.finish_reason,
        )


@pytest.fixture
def session() -> type[ListedSession]:
    return ListedSession


@pytest.fixture
def make_model(tmp_path: Path) -> ModelMaker:
    """Write a tokenizer as a model directory."""
    return lambda tokenizer, **files: write_model(tmp_path / "other", tokenizer, **files)


@pytest.fixture
def character_model(tmp_path: Path) -> Callable[[str], Path]:
    """A character model of a given alphabet."""
    return lambda alphabet: write_model(tmp_path / "characters", character_tokenizer(alphabet))
