"""An environment of token ids: answer with the prompt's last token, over and over. It needs no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
from headrace.errors import EngineError
from headrace.testing.trouble import FakeSettings, Trouble

STOP = 0
"""The token that ends an answer."""
FIRST: dict[Split, int] = {"train": 1, "evaluation": 2}
"""A prompt's first token, which keeps the splits apart."""
DIGITS_FROM = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeEnvironmentSettings(FakeSettings):
    """A piece of work is an episode or a score."""

    vocabulary: int = 16
    """Token ids below this one are used."""
    length: int = 4
    """Tokens of a prompt after its first."""
    size: int | None = None
    """Tasks per split; None: an endless stream."""


class FakeEnvironment(Environment, Demonstrations):
    """The task at ``index`` spells ``index + seed`` in the base of its vocabulary."""

    Settings = FakeEnvironmentSettings

    def __init__(self, settings: FakeEnvironmentSettings) -> None:
        super().__init__(settings)
        self._options = settings
        self._trouble = Trouble(settings, error=EngineError)
        self._seed = 0

    def start(self, context: EnvironmentContext) -> None:
        self._seed = context.seed

    def size(self, split: Split) -> int | None:
        return self._options.size

    def task(self, index: int, *, split: Split) -> Task:
        base, rest = self._options.vocabulary - DIGITS_FROM, index + self._seed
        digits = []
        for _ in range(self._options.length):
            rest, digit = divmod(rest, base)
            digits.append(DIGITS_FROM + digit)
        prompt = [FIRST[split], *reversed(digits)]
        return Task(id="-".join(map(str, prompt)), data={"prompt": prompt, "answer": prompt[-1]})

    async def run(self, task: Task, session: GenerationSession) -> Episode:
        await self._trouble.work_async("an episode")
        prompt = np.array(task.data["prompt"], dtype=np.int32)
        completion = await session.generate(prompt, stop_token_ids=(STOP,))
        return Episode.single_turn(prompt, completion, text=_text(completion.token_ids))

    def score(self, task: Task, episode: Episode) -> Score:
        """The share of sampled tokens that are the answer."""
        self._trouble.work("a score")
        sampled = episode.tokens[episode.loss_mask & (episode.tokens != STOP)]
        right = sampled == task.data["answer"]
        return Score(reward=float(right.mean()) if len(right) else 0.0)

    def demonstration(self, task: Task) -> Episode:
        prompt = task.data["prompt"]
        tokens = np.array([*prompt, task.data["answer"], STOP], dtype=np.int32)
        return Episode(
            tokens=tokens,
            loss_mask=np.arange(len(tokens)) >= len(prompt),
            logprobs=np.zeros(len(tokens), dtype=np.float32),
            spans=(),
            finish_reason="stop",
            text=_text(tokens[len(prompt) :]),
        )


def _text(tokens: Array | Sequence[int]) -> str:
    return " ".join(str(token) for token in tokens)
