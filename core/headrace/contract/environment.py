"""The ``environment`` role: a resumable stream of tasks, episodes against a generation session, scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from headrace.contract.columns import Array
from headrace.contract.generation import Completion, FinishReason, VersionSpan
from headrace.contract.model import ModelFacts
from headrace.contract.plugin import Plugin

Split = Literal["train", "evaluation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem. ``data`` holds plain values (text, numbers, lists, maps) and travels between processes."""

    id: str
    """Stable: the same problem has the same id in every run."""
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLengths:
    """How long an environment's tasks are, in tokens of a model that is not loaded yet."""

    longest_prompt: int
    longest_text: str
    """How that prompt begins, for messages."""
    shortest_answer: int | None = None
    """Of their own answers, with what ends it; None: they have none, or none is known."""
    exact: bool = False
    """No other answer is rewarded."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """One trajectory's tokens, the three arrays aligned: prompt, sampled tokens, anything an environment inserted."""

    tokens: Array
    """int32 [L]."""
    loss_mask: Array
    """bool [L]: True exactly where the policy sampled the token."""
    logprobs: Array
    """float32 [L]: behaviour log-probs, 0 where the mask is False."""
    spans: tuple[VersionSpan, ...]
    """Versions of the sampled tokens, in coordinates of ``tokens``."""
    finish_reason: FinishReason
    text: str = ""
    """What a person would read as the answer."""

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.loss_mask), len(self.logprobs)}
        if len(lengths) != 1:
            raise ValueError(
                f"an episode's arrays are aligned; got {len(self.tokens)} tokens, {len(self.loss_mask)} mask values, "
                f"{len(self.logprobs)} log-probs"
            )

    @property
    def turn_ends(self) -> Array:
        """int64: where the turns end, each a run of sampled tokens: its last token."""
        ends: Array = np.flatnonzero(self.loss_mask & ~np.append(self.loss_mask[1:], False))
        return ends

    @classmethod
    def single_turn(cls, prompt: Array, completion: Completion, *, text: str = "") -> Episode:
        """An episode of one prompt and one completion."""
        sampled, start = len(completion.token_ids), len(prompt)
        return cls(
            tokens=np.concatenate([prompt, completion.token_ids]).astype(np.int32),
            loss_mask=np.arange(start + sampled) >= start,
            logprobs=np.concatenate([np.zeros(start), completion.logprobs]).astype(np.float32),
            spans=tuple(
                VersionSpan(version=s.version, start=s.start + start, stop=s.stop + start) for s in completion.spans
            ),
            finish_reason=completion.finish_reason,
            text=text,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """An episode's reward; NaN means "could not be scored" and is never trained on."""

    reward: float
    correct: bool | None = None
    """For accuracy in evaluation; None: ``reward >= 1``."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward, for metrics."""
    turns: tuple[float, ...] = ()
    """What each turn earned, in order: one number for each run of sampled tokens, ``reward`` together. Empty: all of it
    came at the end."""


class GenerationSession(Protocol):
    """What an episode may ask of the rollout: every call is answered by the episode's one policy version."""

    async def generate(
        self, prompt: Array, *, stop_token_ids: tuple[int, ...] = (), max_new_tokens: int | None = None
    ) -> Completion:
        """Continue ``prompt`` (int32 [P]). ``max_new_tokens``: at most the job's own limit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentContext:
    """What core tells an environment at start, in workers and in scoring processes alike."""

    model_path: str
    """Where the tokenizer files are."""
    seed: int
    directory: str
    """The job file's directory: relative paths in settings are relative to it."""


class Environment(Plugin, ABC):
    """Used in environment workers (everything) and in scoring processes (``start`` and ``score``)."""

    @classmethod
    def check_model(
        cls, settings: Any, model: ModelFacts, *, directory: str, origin: Callable[[str], str]
    ) -> TaskLengths | None:
        """As :meth:`preflight`, about the model: raise a HeadraceError when it cannot read or write the tasks, for
        example for characters that it lacks; else say how long these are, None when that cannot be told."""
        return None

    @abstractmethod
    def start(self, context: EnvironmentContext) -> None:
        """Load data and tokenizer. ConfigError when a setting or file is wrong."""

    @abstractmethod
    def size(self, split: Split) -> int | None:
        """Number of distinct tasks, or None for an endless stream."""

    @abstractmethod
    def task(self, index: int, *, split: Split) -> Task:
        """The task at ``index`` (0 ≤ index, and < size): a pure function of settings, seed, index and split, so a
        stream is resumed by its position alone. The splits share no task."""

    @abstractmethod
    async def run(self, task: Task, session: GenerationSession) -> Episode:
        """Play one episode."""

    @abstractmethod
    def score(self, task: Task, episode: Episode) -> Score:
        """Pure; called in a scoring process that is killed past its deadline. An exception makes the trajectory
        unscored, never a row with reward 0."""


class Demonstrations(ABC):
    """Capability: tasks come with a right answer to imitate (needed by ``supervised``)."""

    @abstractmethod
    def demonstration(self, task: Task) -> Episode:
        """The answer as an episode: mask True on the answer's tokens, log-probs 0, no spans."""
