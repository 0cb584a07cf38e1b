"""The model of the fake engines: the next token's distribution follows from the previous token alone.

    logits(· | previous) = weight[previous] + bias

It is small enough to compute by hand, has true log-probs and gradients, and the fake trainer and the fake engine agree
on it to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from headrace.contract import Array
from headrace.errors import EngineError
from headrace.testing.tensors import read_tensors, write_tensors

WEIGHT, BIAS = "bigram.weight", "bigram.bias"
"""float32 [V, V], the row of each previous token, and float32 [V]."""
CRITIC = "critic.value"
"""float32 [V], of each previous token; only in a trainer that keeps a critic."""
CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bigram:
    """``max_length``: tokens of prompt and response together."""

    tensors: Mapping[str, Array]
    max_length: int

    @property
    def vocabulary(self) -> int:
        """V."""
        return len(self.tensors[BIAS])

    def logprobs(self, previous: Array, *, temperature: float) -> Array:
        """float64 [T, V]: the tempered distribution after each of the tokens ``previous`` (int [T])."""
        weight, bias = self.tensors[WEIGHT], self.tensors[BIAS]
        logits = (weight[previous].astype(np.float64) + bias) / temperature
        logits -= logits.max(axis=-1, keepdims=True)
        logprobs: Array = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return logprobs

    def values(self, previous: Array) -> Array:
        """float32 [T]: the critic's, after each of the tokens ``previous`` (int [T]). EngineError without a critic."""
        if CRITIC not in self.tensors:
            raise EngineError(
                "values were asked of a model without a critic", fix="start the engine with TrainingContext.values"
            )
        values: Array = self.tensors[CRITIC][previous]
        return values

    def with_critic(self) -> Bigram:
        """The same model beside a critic that knows nothing yet."""
        return self.with_tensors({**self.tensors, CRITIC: np.zeros(self.vocabulary, dtype=np.float32)})

    def with_tensors(self, tensors: Mapping[str, Array]) -> Bigram:
        """The same model with other weights."""
        return Bigram(tensors=tensors, max_length=self.max_length)

    def save(self, path: str) -> None:
        """A Hugging Face-format directory, created when missing."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"model_type": "bigram", "vocab_size": self.vocabulary, "max_position_embeddings": self.max_length}
        (folder / CONFIG).write_text(json.dumps(config))
        write_tensors(folder / WEIGHTS, self.tensors)


def random_bigram(*, vocabulary: int, max_length: int, seed: int) -> Bigram:
    """Logits of standard deviation 1, so that no token is certain and none impossible."""
    generator = np.random.default_rng(seed)
    tensors = {
        WEIGHT: generator.standard_normal((vocabulary, vocabulary), dtype=np.float32),
        BIAS: np.zeros(vocabulary, dtype=np.float32),
    }
    return Bigram(tensors=tensors, max_length=max_length)


def load_bigram(path: str) -> Bigram:
    """EngineError when the directory holds no bigram model."""
    folder = Path(path)
    tensors = read_tensors(folder)
    if not (folder / CONFIG).is_file() or sorted(tensors) != sorted((WEIGHT, BIAS)):
        raise EngineError(
            f"{path} holds no bigram model; its tensors are {sorted(tensors)}",
            fix="the fake engines serve and train only models that FakeTrainingEngine.create_model wrote",
        )
    config = json.loads((folder / CONFIG).read_text())
    return Bigram(tensors=tensors, max_length=config["max_position_embeddings"])


def draw(logprobs: Array, *, seed: int, position: int) -> int:
    """A token of the distribution ``logprobs`` ([V]), by a hash of ``seed`` and ``position``."""
    share = xxhash.xxh3_64_intdigest(f"{seed}/{position}".encode()) / 2**64
    return min(int(np.searchsorted(np.exp(logprobs).cumsum(), share, side="right")), len(logprobs) - 1)
