"""``running_parity``: after each bit, whether the ones so far are odd. ``0110=`` is answered with ``0100``.

One wrong digit spoils all that follow, so a policy must keep a state. Invariant: a string of bits belongs to one split
for ever, whatever the seed.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from headrace.contract import (
    Array,
    Demonstrations,
    Environment,
    EnvironmentContext,
    Episode,
    GenerationSession,
    Score,
    Split,
    Task,
)
from headrace.errors import ConfigError

HELD_OUT = 8
"""One string in this many is held out for evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParitySettings:
    """How many bits a prompt has: evenly from ``shortest`` to ``longest``."""

    shortest: int = 6
    longest: int = 16

    def __post_init__(self) -> None:
        if not 6 <= self.shortest <= self.longest:
            raise ValueError(
                f"6 <= shortest <= longest must hold, got {self.shortest} and {self.longest}: "
                "with fewer bits a split may have no string of that length"
            )


class RunningParity(Environment, Demonstrations):
    """An endless stream of strings."""

    Settings = ParitySettings

    def __init__(self, settings: ParitySettings) -> None:
        super().__init__(settings)
        self._options = settings

    def start(self, context: EnvironmentContext) -> None:
        folder = Path(context.model_path)
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError("the model has no tokenizer.json", origin=str(folder), fix="choose a model with one")
        self._seed = context.seed
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._stop = int(json.loads((folder / "generation_config.json").read_text())["eos_token_id"])
        spelt = self._tokenizer.decode(self._tokenizer.encode("01=").ids)
        if spelt != "01=":
            raise ConfigError(
                f"the tokenizer turns '01=' into {spelt!r}",
                origin=str(folder),
                fix="add 0, 1 and = to the alphabet of [model.scratch]",
            )

    def size(self, split: Split) -> int | None:
        return None

    def task(self, index: int, *, split: Split) -> Task:
        generator = random.Random(f"{self._seed}/{split}/{index}")
        while True:
            bits = "".join(generator.choices("01", k=generator.randint(self._options.shortest, self._options.longest)))
            if _held_out(bits) == (split == "evaluation"):
                return Task(id=bits, data={"prompt": f"{bits}=", "answer": running_parity(bits)})

    async def run(self, task: Task, session: GenerationSession) -> Episode:
        prompt = self._prompt(task)
        completion = await session.generate(prompt, stop_token_ids=(self._stop,))
        answered = completion.token_ids
        if len(answered) and answered[-1] == self._stop:
            answered = answered[:-1]
        return Episode.single_turn(prompt, completion, text=self._tokenizer.decode(answered.tolist()))

    def score(self, task: Task, episode: Episode) -> Score:
        """The share of digits that are right before the first wrong one, for an answer that the policy ended."""
        expected: str = task.data["answer"]
        right = 0
        while right < min(len(expected), len(episode.text)) and episode.text[right] == expected[right]:
            right += 1
        exact = episode.text == expected and episode.finish_reason == "stop"
        ended = episode.finish_reason == "stop" and len(episode.text) == len(expected)
        return Score(reward=right / len(expected) if ended else 0.0, correct=exact)

    def demonstration(self, task: Task) -> Episode:
        prompt = self._prompt(task)
        answer = [*self._tokenizer.encode(task.data["answer"], add_special_tokens=False).ids, self._stop]
        length = len(prompt) + len(answer)
        return Episode(
            tokens=np.array([*prompt, *answer], dtype=np.int32),
            loss_mask=np.arange(length) >= len(prompt),
            logprobs=np.zeros(length, dtype=np.float32),
            spans=(),
            finish_reason="stop",
            text=task.data["answer"],
        )

    def _prompt(self, task: Task) -> Array:
        return np.array(self._tokenizer.encode(task.data["prompt"]).ids, dtype=np.int32)


def running_parity(bits: str) -> str:
    """For every prefix of ``bits``: 1 when its ones are odd."""
    return "".join(str(bits[: n + 1].count("1") % 2) for n in range(len(bits)))


def _held_out(bits: str) -> bool:
    return hashlib.blake2b(bits.encode(), digest_size=8).digest()[0] % HELD_OUT == 0
