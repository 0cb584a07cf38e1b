"""``reasoning_gym``: any of its generated task families, judged by its own verifiers.

A task is found by trial: its (seed, split, index) names a sequence of candidates, and the first whose prompt
falls on the split's side of a hash is the task. Invariant: a prompt belongs to one split for ever, whatever the
seed; so however few distinct prompts a family has, evaluation never meets one that was trained on.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

from headrace.contract import Episode, Score, Split, Task, TaskLengths
from headrace.errors import ConfigError, PluginError
from headrace_environments.chat import ChatSettings
from headrace_environments.plain import from_plain, to_plain
from headrace_environments.text import Origin, Scorer, TextEnvironment, finished, render

Dataset: TypeAlias = Any
"""A ``reasoning_gym`` dataset; the package has no types."""
HELD_OUT = 8
"""One prompt in this many is held out for evaluation."""
BLOCK = 512
"""Tasks that share a generator: some families build tables when they are created."""
ATTEMPTS = 8
"""Candidates per task in one generator."""
ROUNDS = 64
"""Generators tried before a family is said to have no task for a split."""
CHECK_SECONDS = 2.0
"""How long a start may spend on trying tasks against template and vocabulary."""
NEAR = 3
"""Names that are shown of a long list."""

RESERVED = frozenset({"seed", "size"})
"""Fields of every family's configuration that a job leaves alone."""
HASH_ORDERED = frozenset({"codeio", "isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"})
"""Families of reasoning-gym 0.1.25 whose tasks follow the iteration order of Python sets, and so its hash seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGymSettings(ChatSettings):
    """What to generate and how to ask."""

    dataset: str
    """A family's name, such as ``chain_sum``."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The family's own settings, less ``seed`` and ``size``."""
    prompt: str = "{question}"
    """A template over ``question`` and ``metadata``: ``"{metadata[expression]}="``."""
    reward: str = "verifier"

    def __post_init__(self) -> None:
        ChatSettings.__post_init__(self)
        taken = sorted(RESERVED & set(self.config))
        if taken:
            raise ValueError(f"config must not set {' or '.join(taken)}: tasks follow the job's seed, without end")


class ReasoningGym(TextEnvironment):
    """An endless stream of generated problems."""

    Settings = ReasoningGymSettings

    def read(self, directory: str, origin: Origin) -> None:
        self._origin = origin
        self._dataset = lru_cache(maxsize=8)(self._create)
        self._judge = self._create(0, size=16)
        render(self.settings.prompt, self._judge[0], setting="prompt", origin=origin("prompt"))

    def check(self) -> TaskLengths:
        deadline = time.monotonic() + CHECK_SECONDS
        return self.check_texts(self._tasks_until(deadline), origin=f"reasoning_gym {self.settings.dataset}")

    def built_in_rewards(self) -> Mapping[str, Scorer]:
        return {**super().built_in_rewards(), "verifier": self._verify}

    def record(self, task: Task) -> Mapping[str, Any]:
        entry: dict[str, Any] = from_plain(task.data["record"])
        return entry

    def size(self, split: Split) -> int | None:
        return None

    def task(self, index: int, *, split: Split) -> Task:
        settings: ReasoningGymSettings = self.settings
        for entry in self._candidates(index, split):
            prompt = render(settings.prompt, entry, setting="prompt", origin=f"reasoning_gym {settings.dataset}")
            digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
            if (digest[0] % HELD_OUT == 0) == (split == "evaluation"):
                answer = None if entry["answer"] is None else str(entry["answer"])
                data = {"prompt": prompt, "answer": answer, "record": to_plain(entry)}
                return Task(id=f"{settings.dataset}-{digest.hex()}", data=data)
        raise ConfigError(
            f"none of {ATTEMPTS * ROUNDS} generated prompts belongs to split {split!r}",
            origin=f"reasoning_gym {settings.dataset}, task {index}",
            fix="widen the ranges in config: this family has too few distinct prompts for two splits",
        )

    def _candidates(self, index: int, split: Split) -> Iterator[dict[str, Any]]:
        block, place = divmod(index, BLOCK)
        for turn in range(ROUNDS):
            dataset = self._dataset(_derive(self.context.seed, split, block, turn))
            for attempt in range(ATTEMPTS):
                yield dataset[place * ATTEMPTS + attempt]

    def _tasks_until(self, deadline: float) -> Iterator[Task]:
        yield self.task(0, split="evaluation")
        for index in range(BLOCK):
            yield self.task(index, split="train")
            if time.monotonic() > deadline:
                return

    def _verify(self, task: Task, episode: Episode) -> Score:
        """The family's own verdict: 1 is right; some give a little for a wrong answer, and that is kept."""
        if not finished(episode):
            return Score(reward=0.0, components={"malformed": 0.0})
        entry = from_plain(task.data["record"])
        try:
            reward = float(self._judge.score_answer(episode.text, entry))
        except Exception:  # a verifier may raise anything; a broken one's own exception is raised below
            # Some verifiers raise on malformed answers. One that can judge its own answer is in order, so the
            # policy's answer is wrong; one that cannot is broken, and its own exception is the outcome.
            self._judge.score_answer(entry["answer"], entry)
            return Score(reward=0.0, components={"malformed": 1.0})
        return Score(reward=reward, components={"malformed": 0.0})

    def _create(self, seed: int, *, size: int = BLOCK * ATTEMPTS) -> Dataset:
        settings: ReasoningGymSettings = self.settings
        origin = self._origin("dataset")
        try:
            from reasoning_gym.factory import (  # type: ignore[import-untyped]  # it ships no types
                DATASETS,
                create_dataset,
            )
        except ImportError as error:
            raise PluginError(
                "the reasoning_gym environment needs the reasoning-gym package",
                origin=origin,
                fix='pip install "headrace[environments]"',
            ) from error
        if settings.dataset not in DATASETS:
            raise _unknown(settings.dataset, DATASETS, origin)
        _require_hash_seed(settings.dataset, origin)
        try:
            return create_dataset(settings.dataset, seed=seed, size=size, **settings.config)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"reasoning-gym refuses the settings: {error}",
                origin=self._origin("config"),
                fix=f"{settings.dataset} has {', '.join(_fields(DATASETS[settings.dataset][1]))}",
            ) from error


def _unknown(dataset: str, known: Iterable[str], origin: str) -> ConfigError:
    names = sorted(known)
    close = difflib.get_close_matches(dataset, names, n=NEAR)
    hint = f". Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return ConfigError(
        f"reasoning-gym has no dataset {dataset!r}; it has {len(names)}, such as {', '.join(names[:NEAR])}{hint}",
        origin=origin,
        fix=f'set dataset = "{(close or ["chain_sum"])[0]}"; all of them: '
        'python -c "import reasoning_gym.factory as f; print(*sorted(f.DATASETS))"',
    )


def _fields(config: type[Any]) -> list[str]:
    """What ``config`` may set for a dataset with this configuration."""
    return [field.name for field in dataclasses.fields(config) if field.name not in RESERVED]


def _require_hash_seed(dataset: str, origin: str) -> None:
    if dataset in HASH_ORDERED and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
        raise ConfigError(
            f"tasks of {dataset!r} depend on Python's hash seed and would differ between processes",
            origin=origin,
            fix="set the environment variable PYTHONHASHSEED=0 for the whole job, or choose another dataset",
        )


def _derive(seed: int, split: Split, block: int, turn: int) -> int:
    """A generator's seed, 31 bits."""
    name = f"{seed}/{split}/{block}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=4).digest()) >> 1
