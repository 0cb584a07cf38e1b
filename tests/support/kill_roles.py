"""What the processes of a data plane do while some of them are killed; each writes down what it did before it goes on.

A journal has a line per row and step. A line is one write to a file that is only appended to, so that it is whole or
not there, whenever its process is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from headrace.contract import Batch, Column, Ragged
from headrace.dataplane import ColumnSchema, DataPlane, Partition, PartitionSpec, Rows
from headrace.dataplane.serve import serve_ledger, serve_unit
from headrace.errors import DeadlineError, LostRowsError, RunError
from headrace.wire import ipc_address
from headrace_storage.memory import MemoryStorage

PRODUCERS = 8
GROUP = 2
TASKS: dict[str, tuple[str, ...]] = {
    "score": ("prompt", "issue", "tokens"),
    "train": ("prompt", "issue", "tokens", "score"),
}
SPEC = PartitionSpec(
    "phase",
    {
        "prompt": ColumnSchema("int64"),
        "issue": ColumnSchema("int64"),
        "tokens": ColumnSchema("int32", ragged=True),
        "score": ColumnSchema("float32"),
    },
    TASKS,
    GROUP,
    "tokens",
)
LONGEST = 200
"""Tokens."""
CAPACITY = 200_000
"""Bytes of a unit: producers feel how fast consumers are."""
SILENT_SECONDS = 1.5
BEAT_SECONDS = 0.1
LEASE_SECONDS = 1.5
PUT_SECONDS = 3.0
READ_SECONDS = 1.0
TURN_SECONDS = 0.3
"""For which a process waits before it looks whether it is to go on."""
STOP, LAST, END = "stop", "last", "end"
"""Files that say: no new prompts; no more units are killed; all is done."""


class Journal:
    """Appended to. ``fields`` of several rows are given as sequences of one length."""

    def __init__(self, directory: Path, name: str) -> None:
        self._file = os.open(directory / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, **fields: Any) -> None:
        os.write(self._file, (json.dumps({"event": event, **fields}) + "\n").encode())

    def write_rows(self, event: str, rows: list[int], **fields: list[Any]) -> None:
        lines = [
            json.dumps({"event": event, "row": row, **dict(zip(fields, values, strict=True))})
            for row, *values in zip(rows, *fields.values(), strict=True)
        ]
        os.write(self._file, ("\n".join(lines) + "\n").encode())


class Reader:
    """Reads what was added to journals since it last looked."""

    def __init__(self, directory: Path, pattern: str) -> None:
        self._directory = directory
        self._pattern = pattern
        self._read: dict[Path, int] = {}

    def new(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self._directory.glob(self._pattern)):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for line in file:
                    if line.endswith(b"\n"):
                        self._read[path] = self._read.get(path, 0) + len(line)
                        yield {"of": path.stem, **json.loads(line)}


def checksum(prompt: int, issue: int, tokens: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(tokens).tobytes(), prompt * 1000 + issue)


def scores(batch: Batch) -> np.ndarray[Any, Any]:
    """What the scoring task makes of rows."""
    return np.array([len(tokens) + 0.5 for tokens in batch.ragged("tokens")], dtype=np.float32)


def _begin(directory: Path, name: str) -> None:
    """What the process says on its way out is kept."""
    log = os.open(directory / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _everywhere(name: str, value: float) -> None:
    """In whichever module of the data plane it is."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("headrace.dataplane.") and hasattr(module, name):
            setattr(module, name, value)


def address_of(directory: Path, name: str) -> str:
    return ipc_address(str(directory), name)


def ledger(directory: Path, name: str) -> None:
    _begin(directory, name)
    _everywhere("SILENT_SECONDS", SILENT_SECONDS)
    asyncio.run(serve_ledger(address_of(directory, name)))


def unit(directory: Path, name: str) -> None:
    _begin(directory, name)
    _everywhere("BEAT_SECONDS", BEAT_SECONDS)
    to = address_of(directory, "ledger")
    asyncio.run(serve_unit(address_of(directory, name), MemoryStorage(None), ledger=to, capacity=CAPACITY))


def _partition(directory: Path) -> Partition:
    return DataPlane(address_of(directory, "ledger")).create(SPEC)


# ---------------------------------------------------------------- producers


def producer(directory: Path, name: str, number: int) -> None:
    """The first also has the prompts of lost groups made anew."""
    _begin(directory, name)
    journal, partition = Journal(directory, name), _partition(directory)
    again = _Again(directory, journal, partition) if number == 0 else None
    for prompt in itertools.count(number, PRODUCERS):
        if (directory / STOP).exists():
            break
        _issue(partition, journal, prompt, 0)
        if again is not None:
            again.look(wait=0.0)
    while again is not None:
        last = (directory / LAST).exists()
        if not again.look(wait=0.0 if last else TURN_SECONDS) and last:
            break


def _issue(partition: Partition, journal: Journal, prompt: int, first: int) -> None:
    """Until a unit has said that it keeps them: one that was killed may have had them, and nobody knows."""
    for issue in itertools.count(first):
        lengths = np.random.default_rng([prompt, issue]).integers(0, LONGEST, GROUP)
        tokens = [np.arange(length, dtype=np.int32) * (issue + 1) + prompt for length in lengths]
        sums = [checksum(prompt, issue, values) for values in tokens]
        columns: dict[str, Column] = {
            "prompt": np.full(GROUP, prompt),
            "issue": np.full(GROUP, issue),
            "tokens": Ragged.from_arrays(tokens),
        }
        journal.write("asked", prompt=prompt, issue=issue, sums=sums)
        moves = partition.moves
        try:
            rows = partition.put(columns, deadline=PUT_SECONDS).tolist()
        except (DeadlineError, LostRowsError) as error:
            journal.write("unanswered", prompt=prompt, issue=issue, error=str(error))
            continue
        finally:
            journal.write("moved", times=partition.moves - moves)
        journal.write_rows("put", rows, prompt=[prompt] * GROUP, issue=[issue] * GROUP, sum=sums)
        return


class _Again:
    """Knows from the producers' journals which prompt a group was for."""

    def __init__(self, directory: Path, journal: Journal, partition: Partition) -> None:
        self._reader = Reader(directory, "producer-*.jsonl")
        self._journal = journal
        self._partition = partition
        self._known: dict[int, tuple[int, int]] = {}
        self._lost: set[int] = set()
        """Whose prompt is not known yet."""

    def look(self, *, wait: float) -> bool:
        """Whether a prompt was put again."""
        for group in self._partition.lost(wait=wait):
            self._journal.write("lost", group=group)
            self._lost.add(group)
        if not self._lost:
            return False
        for line in self._reader.new():
            if line["event"] == "put":
                self._known[line["row"] // GROUP] = line["prompt"], line["issue"]
        found = self._lost & self._known.keys()
        for group in sorted(found):
            prompt, issue = self._known[group]
            _issue(self._partition, self._journal, prompt, issue + 1)
        self._lost -= found
        return bool(found)


# ---------------------------------------------------------------- consumers


def consumer(directory: Path, name: str, task: str) -> None:
    _begin(directory, name)
    journal, partition = Journal(directory, name), _partition(directory)
    while not (directory / END).exists():
        asked = time.monotonic()
        try:
            held = partition.lease(task, 8, at_least=1, seconds=LEASE_SECONDS, deadline=TURN_SECONDS)
        except DeadlineError:
            continue
        _serve(partition, journal, task, held, asked)


def _serve(partition: Partition, journal: Journal, task: str, held: Rows, asked: float) -> None:
    rows = held.rows.tolist()
    attempts, times = held.attempts.tolist(), [asked] * len(rows)
    journal.write_rows("leased", rows, task=[task] * len(rows), attempts=attempts, time=times)
    try:
        batch = partition.get(held, deadline=READ_SECONDS)
        _note_read(journal, batch, task)
        if task == "score":
            partition.try_put({"score": scores(batch)}, rows=batch.rows, deadline=READ_SECONDS)
    except (DeadlineError, LostRowsError):
        journal.write_rows("unread", rows, task=[task] * len(rows))
        with suppress(RunError):  # the lease may have ended meanwhile
            partition.release(held)
        return
    journal.write_rows("acknowledging", rows, task=[task] * len(rows))
    try:
        partition.acknowledge(held)
    except RunError:
        journal.write_rows("refused", rows, task=[task] * len(rows))
        return
    journal.write_rows("acknowledged", rows, task=[task] * len(rows), time=[time.monotonic()] * len(rows))


def _note_read(journal: Journal, batch: Batch, task: str) -> None:
    prompts, issues = batch.dense("prompt").tolist(), batch.dense("issue").tolist()
    sums = [checksum(*parts) for parts in zip(prompts, issues, batch.ragged("tokens"), strict=True)]
    scored = [True] * len(batch)
    if task == "train":
        scored = (batch.dense("score") == scores(batch)).tolist()
    journal.write_rows(
        "read", batch.rows.tolist(), task=[task] * len(batch), prompt=prompts, issue=issues, sum=sums, scored=scored
    )
