"""``jsonl``: tasks from a file of your own, one JSON object per line.

``prompt`` and ``answer`` are templates over a record's fields. Tasks are in the order of the file; a run shuffles
them anew every epoch.

Invariant: no prompt is in both splits. With ``evaluation_share`` a prompt's hash decides, so that adding records
never moves another one across; with ``evaluation_path`` a prompt that is in both files is an error.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.contract import Split, Task, TaskLengths
from headrace.errors import ConfigError
from headrace_environments.chat import ChatSettings
from headrace_environments.text import Origin, TextEnvironment, render
from headrace_environments.tokenizer import shorten

CHECKED = 2000
"""At most so many tasks per split, evenly spaced, are tried against the vocabulary at start, and those that stand out
by their length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlSettings(ChatSettings):
    """Paths are relative to the job file's folder."""

    path: str
    prompt: str = "{prompt}"
    answer: str = "{answer}"
    """Empty: the records have no answer; only a reward of one's own can judge."""
    reward: str = "exact"
    evaluation_path: str = ""
    """A second file to evaluate on. Empty: ``evaluation_share`` of the first."""
    evaluation_share: float = 0.1

    def __post_init__(self) -> None:
        ChatSettings.__post_init__(self)
        if not 0 <= self.evaluation_share < 1:
            raise ValueError(f"evaluation_share must be at least 0 and less than 1, got {self.evaluation_share}")
        if not self.answer and self.reward == "exact":
            raise ValueError('reward = "exact" compares with an answer; give answer a template, or name a reward')
        for name, template in (("prompt", self.prompt), ("answer", self.answer)):
            if template and not _has_field(template, name):
                raise ValueError(f"{name} = {template!r} names no field; did you mean {{{template}}} in braces?")


def _has_field(template: str, name: str) -> bool:
    try:
        return any(field is not None for _, field, _, _ in string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{name} = {template!r} is not a template: {error}; write {{{{ for {{") from None


class Jsonl(TextEnvironment):
    """A finite stream: as many tasks as the file has records."""

    Settings = JsonlSettings

    def read(self, directory: str, origin: Origin) -> None:
        settings: JsonlSettings = self.settings
        tasks = self._read("path", directory, origin)
        self._tasks: dict[Split, list[Task]]
        if settings.evaluation_path:
            held_out = self._read("evaluation_path", directory, origin)
            _refuse_overlap(tasks, held_out, f"{origin('path')} and {origin('evaluation_path')}")
            self._tasks = {"train": tasks, "evaluation": held_out}
        else:
            sides = [_fraction(task.data["prompt"]) < settings.evaluation_share for task in tasks]
            self._tasks = {
                "train": [t for t, out in zip(tasks, sides, strict=True) if not out],
                "evaluation": [t for t, out in zip(tasks, sides, strict=True) if out],
            }
            self._refuse_empty_side([task.data["prompt"] for task in tasks], origin("path"))

    def check(self) -> TaskLengths:
        chosen = [task for tasks in self._tasks.values() for task in _telling(tasks)]
        return self.check_texts(chosen, origin=self.settings.path)

    def size(self, split: Split) -> int | None:
        return len(self._tasks[split])

    def task(self, index: int, *, split: Split) -> Task:
        tasks = self._tasks[split]
        if not 0 <= index < len(tasks):
            raise IndexError(f"task {index} of {len(tasks)} in split {split!r}")
        return tasks[index]

    def _read(self, key: str, directory: str, origin: Origin) -> list[Task]:
        """The tasks of the file that setting ``key`` names."""
        path = Path(directory) / getattr(self.settings, key)
        places = {template: origin(template) for template in ("prompt", "answer")}
        tasks = [self._task(record, f"{path}:{line}", places) for line, record in _records(path, origin(key))]
        if not tasks:
            raise ConfigError(f"{path} has no records", origin=origin(key), fix="write one JSON object per line")
        if not any(task.data["answer"] != "" for task in tasks):
            raise ConfigError(
                f"every answer in {path} is empty: the policy would learn to say nothing",
                origin=origin("answer"),
                fix='name the field that has the answers, or set answer = "" and name a reward of your own',
            )
        return tasks

    def _task(self, record: dict[str, Any], line: str, places: Mapping[str, str]) -> Task:
        def rendered(template: str, setting: str) -> str:
            return render(template, record, setting=setting, origin=f"{places[setting]}, at {line}")

        settings: JsonlSettings = self.settings
        prompt = rendered(settings.prompt, "prompt")
        answer = rendered(settings.answer, "answer") if settings.answer else None
        digest = hashlib.blake2b(json.dumps([prompt, answer]).encode(), digest_size=8).hexdigest()
        return Task(id=digest, data={"prompt": prompt, "answer": answer, "record": record})

    def _refuse_empty_side(self, prompts: list[str], origin: str) -> None:
        share = self.settings.evaluation_share
        empty = [split for split, tasks in self._tasks.items() if not tasks and (split == "train" or share > 0)]
        if empty:
            raise ConfigError(
                f"with evaluation_share = {share}, {_counted(prompts)} none for {empty[0]}: equal prompts are on one "
                "side",
                origin=origin,
                fix="add records with other prompts, change evaluation_share (0: train on all), or give "
                "evaluation_path",
            )


def _counted(prompts: list[str]) -> str:
    """How many there are, and leave."""
    different = len(set(prompts))
    if len(prompts) == 1:
        return "1 record leaves"
    if different == 1:
        return f"{len(prompts)} records, all with the prompt {shorten(prompts[0])!r}, leave"
    return f"{len(prompts)} records with {different} different prompts leave"


def _telling(tasks: list[Task]) -> list[Task]:
    """Those that are checked for all."""
    if not tasks:
        return []
    longest = max(tasks, key=lambda task: len(task.data["prompt"]))
    shortest = min(tasks, key=lambda task: len(task.data["answer"] or ""))
    return [*tasks[:: -(-len(tasks) // CHECKED)], longest, shortest]


def _refuse_overlap(train: list[Task], held_out: list[Task], origin: str) -> None:
    shared = {t.data["prompt"] for t in train} & {t.data["prompt"] for t in held_out}
    if shared:
        raise ConfigError(
            f"{len(shared)} prompts are in both files, for example {min(shared)!r}: evaluation would be on "
            "training data",
            origin=origin,
            fix="remove them from one of the files",
        )


def _records(path: Path, origin: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, record) for every line that is not blank. ``origin``: where the path was written."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no data file {path}",
            origin=origin,
            fix="a relative path starts at the job file's folder",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", origin=origin, fix="give a readable file in UTF-8"
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_int=_bounded_int)
        except ValueError as error:
            raise ConfigError(
                f"not a record: {error}", origin=f"{path}:{number}", fix="write one JSON object per line"
            ) from error
        if not isinstance(record, dict):
            raise ConfigError(
                f"a record must be a JSON object, this is {line.strip()[:60]!r}",
                origin=f"{path}:{number}",
                fix='write fields with names: {"prompt": "…", "answer": "…"}',
            )
        yield number, record


def _bounded_int(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{text} does not fit 64 bits; write it as text")
    return value


def _fraction(prompt: str) -> float:
    """A number in [0, 1) that depends on the prompt alone."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest()) / 2**64
