"""Response lengths: a distribution, a file of numbers, or what a recorded run generated.

Invariant: a trajectory's length follows from the seed and its id alone, so that every policy is tried on the same
trajectories.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from headrace.contract import Array
from headrace.errors import ConfigError, RunError
from headrace.observe.epochs import standing_events
from headrace.observe.events import TrajectoryFinished
from headrace.validation import near_miss, validate

_BLOCK = 4096
"""Trajectories whose lengths are drawn together."""


class Lengths(ABC):
    """A distribution of response lengths, in tokens."""

    @property
    @abstractmethod
    def longest(self) -> float:
        """No response is longer; infinity when there is no such bound."""

    @abstractmethod
    def at(self, scores: Array) -> Array:
        """float64 [n]: the lengths at standard normal scores, float64 [n], rising with them; rounded and bounded by
        whoever asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Lengths):
    """Every response has ``tokens``."""

    tokens: float

    @property
    def longest(self) -> float:
        return self.tokens

    def at(self, scores: Array) -> Array:
        return np.full(len(scores), self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal(Lengths):
    """exp(N(ln ``median``, ``sigma``²)), and ``cap`` for what is above it, as a limit on new tokens cuts it."""

    median: float
    sigma: float
    cap: float = float("inf")

    @property
    def longest(self) -> float:
        return self.cap

    def at(self, scores: Array) -> Array:
        lengths: Array = np.minimum(self.median * np.exp(self.sigma * scores), self.cap)
        return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Bimodal(Lengths):
    """``long`` with probability ``share``, else ``short``."""

    short: float
    long: float
    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share is a probability, 0 to 1, got {self.share:g}")

    @property
    def longest(self) -> float:
        return max(self.short, self.long)

    def at(self, scores: Array) -> Array:
        return np.where(_quantiles(scores) >= 1 - self.share, max(self.long, self.short), min(self.long, self.short))


class Recorded(Lengths):
    """Drawn from lengths that were seen, each as likely as the others."""

    def __init__(self, tokens: Array) -> None:
        self._tokens = np.sort(tokens)

    @property
    def longest(self) -> float:
        return float(self._tokens[-1])

    def at(self, scores: Array) -> Array:
        places = (_quantiles(scores) * len(self._tokens)).astype(np.int64)
        lengths: Array = self._tokens[np.minimum(places, len(self._tokens) - 1)]
        return lengths


def _quantiles(scores: Array) -> Array:
    normal = NormalDist()
    return np.array([normal.cdf(score) for score in scores.tolist()])


DISTRIBUTIONS: Mapping[str, type[Any]] = {"constant": Constant, "lognormal": LogNormal, "bimodal": Bimodal}
FORMS = (
    "lognormal:median=1300,sigma=1,cap=30000 or bimodal:short=500,long=8000,share=0.05 or constant:tokens=800, "
    "a file of numbers, or a run directory"
)


def parse_lengths(text: str, *, origin: str, directory: Path = Path()) -> Lengths:
    """What ``--lengths`` and ``simulation.lengths`` write; a path is relative to ``directory``. ConfigError when it
    means nothing, RunError when a file cannot be read."""
    path = directory / text
    if path.is_dir():
        return recorded_lengths(path)
    if path.is_file():
        return Recorded(_numbers(path, origin))
    name, _, settings = text.partition(":")
    if name not in DISTRIBUTIONS:
        meant = near_miss(name, DISTRIBUTIONS)
        hint = f". Did you mean {meant!r}?" if meant else ""
        raise ConfigError(
            f"{text!r} is no file, no run and no distribution of lengths{hint}", origin=origin, fix=f"write {FORMS}"
        )
    distribution = DISTRIBUTIONS[name]
    value, problems = validate(distribution, _settings(text, settings, origin))
    for problem in problems:
        key = ".".join(map(str, problem.path))
        raise ConfigError(f"{text!r}: {key}: {problem.message}", origin=origin, fix=problem.fix or f"write {FORMS}")
    assert isinstance(value, Lengths), "validate gives a value or problems"
    return value


def _settings(text: str, settings: str, origin: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in filter(None, settings.split(",")):
        key, _, number = part.partition("=")
        try:
            found[key.strip()] = float(number)
        except ValueError:
            found[key.strip()] = float("nan")
        if not found[key.strip()] > 0:
            raise ConfigError(
                f"{text!r}: {part!r} is not KEY=NUMBER with a number above 0", origin=origin, fix=f"write {FORMS}"
            )
    return found


def _numbers(path: Path, origin: str) -> Array:
    try:
        tokens = np.array(path.read_text().replace(",", " ").split(), dtype=np.float64)
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} holds no lengths: {error}", origin=origin, fix="write numbers of tokens with spaces between them"
        ) from error
    if not len(tokens) or not (tokens > 0).all() or not np.isfinite(tokens).all():
        raise RunError(
            f"{path} holds no lengths: there must be numbers, all above 0",
            origin=origin,
            fix="write one number of tokens per response",
        )
    return tokens


def recorded_lengths(run: Path) -> Lengths:
    """Response lengths that a run sampled, what was dropped included. RunError when it sampled none."""
    tokens = [
        event.response_tokens
        for event in standing_events(run)
        if isinstance(event, TrajectoryFinished) and event.instance
    ]
    if not tokens:
        raise RunError(f"{run} sampled nothing: it has no lengths", fix="name a run with a phase that rolls out")
    return Recorded(np.array(tokens, dtype=np.float64))


class Trajectories:
    """The length of each trajectory, in tokens: at least 1, at most ``most``. Groups ask ``prompts`` in turn, and
    answers to the same prompt have the share ``alike`` of the variance of their scores in common."""

    def __init__(
        self,
        lengths: Lengths,
        *,
        seed: int,
        most: int,
        group_size: int = 1,
        prompts: int | None = None,
        alike: float = 0.0,
        purpose: str = "",
    ) -> None:
        self._lengths = lengths
        self._seed = seed
        self._most = most
        self._group_size = group_size
        self._prompts = prompts
        self._alike = alike
        self._purpose = purpose
        self._blocks: dict[int, list[int]] = {}
        self._scores: dict[int, Array] = {}
        """Of prompts, by block."""

    @property
    def longest(self) -> int:
        """No trajectory is longer."""
        return int(min(self._lengths.longest, self._most))

    def tokens(self, trajectory: int) -> int:
        """Those that it will have."""
        number, place = divmod(trajectory, _BLOCK)
        block = self._blocks.get(number)
        if block is None:
            scores = self._normal(number, self._purpose)
            if self._alike:
                scores = math.sqrt(1 - self._alike) * scores + math.sqrt(self._alike) * self._of_prompts(number)
            drawn = self._lengths.at(scores)
            block = self._blocks[number] = np.clip(np.rint(drawn), 1, self._most).astype(np.int64).tolist()
        return block[place]

    def prompt(self, group: int) -> int:
        """What a group asks."""
        return group if self._prompts is None else group % self._prompts

    def _normal(self, block: int, purpose: str) -> Array:
        return np.random.default_rng([self._seed, block, *purpose.encode()]).standard_normal(_BLOCK)

    def _of_prompts(self, number: int) -> Array:
        """The scores of the prompts of a block of trajectories."""
        scores = np.empty(_BLOCK)
        for place, trajectory in enumerate(range(number * _BLOCK, (number + 1) * _BLOCK)):
            block, prompt = divmod(self.prompt(trajectory // self._group_size), _BLOCK)
            if block not in self._scores:
                self._scores[block] = self._normal(block, f"{self._purpose}/prompts")
            scores[place] = self._scores[block][prompt]
        return scores

    def apart(self, purpose: str) -> Trajectories:
        """Others, from the same distribution."""
        return Trajectories(self._lengths, seed=self._seed, most=self._most, purpose=purpose)
