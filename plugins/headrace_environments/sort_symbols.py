"""``sort_symbols``: put symbols in order, distinct ones unless told otherwise. ``q7bk=`` is answered with ``7bkq``.

The number of symbols is log-normal, so that response lengths have the long tail that asynchronous rollout is
about. Invariant: what the symbols are decides their split for ever, whatever the seed and the order in the prompt.
"""

from __future__ import annotations

import hashlib
import math
import string
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from headrace.contract import Split, Task, TaskLengths
from headrace_environments.text import TextEnvironment

SYMBOLS = string.digits + string.ascii_lowercase
"""In the order that answers must have, which is also that of their code points."""
HELD_OUT = 8
"""One set of symbols in this many is held out for evaluation."""
SPLITS: tuple[Split, ...] = ("train", "evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class SortSymbolsSettings:
    """The length of a prompt is ``round(median · exp(sigma · z))``, z standard normal, clipped. Without ``distinct``
    symbols come again, and prompts may be as long as the model can read."""

    median: float = 8.0
    sigma: float = 0.6
    shortest: int = 3
    longest: int = 32
    distinct: bool = True
    reward: str = "exact"

    def __post_init__(self) -> None:
        if not 2 <= self.shortest <= self.longest:
            raise ValueError(f"2 <= shortest <= longest must hold, got {self.shortest} and {self.longest}")
        if self.distinct and self.longest > len(SYMBOLS) - 2:
            raise ValueError(
                f"longest <= {len(SYMBOLS) - 2} must hold, got {self.longest}: symbols are distinct, and both splits "
                "need sets of every length; distinct = false lets symbols come again"
            )
        if not (self.median > 0 and self.sigma >= 0 and math.isfinite(self.median) and math.isfinite(self.sigma)):
            raise ValueError(f"median must be > 0 and sigma >= 0, got {self.median} and {self.sigma}")


class SortSymbols(TextEnvironment):
    """An endless stream of sorting problems."""

    Settings = SortSymbolsSettings

    def check(self) -> TaskLengths:
        self.check_texts([_problem(SYMBOLS)], origin="sort_symbols")
        extremes = (self.settings.shortest, self.settings.longest)
        tasks = [_problem("".join(islice(cycle(SYMBOLS), length))) for length in extremes]
        return self.check_texts(tasks, origin="sort_symbols")

    def size(self, split: Split) -> int | None:
        return None

    def task(self, index: int, *, split: Split) -> Task:
        # A Philox stream of its own per (seed, split, index): streams differ in the counter's highest word.
        key = [self.context.seed % 2**64, SPLITS.index(split)]
        generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, index]))
        while True:
            symbols = self._draw(generator)
            if _held_out("".join(sorted(symbols))) == (split == "evaluation"):
                return _problem(symbols)

    def _draw(self, generator: np.random.Generator) -> str:
        settings: SortSymbolsSettings = self.settings
        length = round(settings.median * math.exp(settings.sigma * generator.standard_normal()))
        length = min(max(length, settings.shortest), settings.longest)
        count = len(SYMBOLS)
        drawn = generator.permutation(count)[:length] if settings.distinct else generator.integers(count, size=length)
        return "".join(SYMBOLS[i] for i in drawn)


def _problem(symbols: str) -> Task:
    answer = "".join(sorted(symbols))
    record = {"symbols": symbols, "answer": answer}
    return Task(id=symbols, data={"prompt": f"{symbols}=", "answer": answer, "record": record})


def _held_out(answer: str) -> bool:
    return hashlib.blake2b(answer.encode(), digest_size=8).digest()[0] % HELD_OUT == 0
