"""What a run is resumed from: a directory per checkpoint, complete and verified or not there at all.

checkpoints/version-00000025-event-00004711/
  manifest.json   size and checksum of every other file, written last
  state.json      where the run was (:class:`RunState`)
  rows.bin        the rows that were stored and not yet trained
  trainer/        the training engine's own save

Written to a hidden directory, synced, renamed. Invariants: a directory under its final name was complete; one that
differs from its manifest by a byte or a file is never resumed from, and an older one is taken instead. The name has the
number of events before the state, which only rises, so one that the event log has in force is never written again: not
when the version stays, after a batch that was skipped.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from headrace.contract import Batch
from headrace.errors import RunError
from headrace.flow import FlowState
from headrace.observe.records import EvaluationRecord
from headrace.run.tasks import TasksIdentity
from headrace.wire import RecordWriter, decode, read_records, sync

MANIFEST, STATE, ROWS, TRAINER = "manifest.json", "state.json", "rows.bin", "trainer"
FORMAT = 2
PARTIAL = ".partial"

log = logging.getLogger(__name__)


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run was, between two batches."""

    format: int = FORMAT
    directory: str
    """Of the job file: relative paths in plugin settings are relative to it."""
    events: int
    """How many events were in force."""
    tasks: TasksIdentity
    """What the positions in the flow are positions in."""
    phase: int
    """Index in the job's phases."""
    step: int
    """The next batch of the phase, from 0."""
    model_path: str
    """What the phase started from."""
    digest: str
    """Of the published weights, which are what the trainer's save holds."""
    flow: FlowState
    skipped_in_a_row: int
    quarantine: list[int]
    prompts: int
    samples: int
    optimizer_steps: int
    evaluations: dict[int, dict[str, float | None]]
    """By version."""
    samples_before: dict[str, EvaluationRecord]
    """The answers shown as "before", by mode."""
    rolled_out: bool
    """Whether anything may have been trained on generated rows."""

    @property
    def version(self) -> int:
        return self.flow.version


class _Format(msgspec.Struct, frozen=True):
    format: int


class _File(msgspec.Struct, frozen=True):
    nbytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete one."""

    path: Path
    state: RunState

    @property
    def trainer(self) -> Path:
        """The training engine's save."""
        return self.path / TRAINER

    def rows(self) -> Iterator[Batch]:
        """The rows that go back into storage, in parts."""
        for frames in read_records(self.path / ROWS):
            yield decode(frames, Batch)


def staging(path: Path) -> Path:
    """Where the checkpoint that will be ``path`` is written; what an interrupted attempt left there is removed."""
    hidden = path.with_name(f".{path.name}{PARTIAL}")
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        hidden.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    return hidden


def complete(hidden: Path, path: Path, state: RunState, rows: Sequence[Batch]) -> None:
    """Finish a checkpoint whose ``trainer`` part has been written to ``hidden``, and give it its name. RunError when
    the disk refuses it; then nothing has the name."""
    try:
        with RecordWriter(hidden / ROWS) as writer:
            for batch in rows:
                writer.write(batch)
            writer.commit()
        (hidden / STATE).write_bytes(msgspec.json.encode(state))
        manifest = {name: _summary(hidden / name) for name in _names(hidden)}
        (hidden / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        for written in [hidden, *hidden.rglob("*")]:
            sync(written)
        shutil.rmtree(path, ignore_errors=True)  # there only when the log lost its end, and with it this number
        hidden.rename(path)
        sync(path.parent)
    except OSError as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(
        f"checkpoint {path} cannot be written: {error.strerror}",
        origin=str(path),
        fix="free disk space, keep fewer with [checkpoint] keep, or put the runs elsewhere with [job] runs",
    )


def read(path: Path) -> Checkpoint:
    """A checkpoint, verified. RunError when it is damaged, or of another format."""
    verify(path)
    return _whole(path)


def verify(path: Path) -> None:
    """RunError when a file is missing, is not what was written, or was not written with the others."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=dict[str, _File])
        if found := set(manifest).symmetric_difference(_names(path)):
            raise RunError(f"checkpoint {path} and its manifest differ by {', '.join(sorted(found))}", origin=str(path))
        for name, written in manifest.items():
            if _summary(path / name) != written:
                raise RunError(f"checkpoint file {path / name} is not what was written", origin=str(path))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RunError(f"checkpoint {path} cannot be read: {error}", origin=str(path)) from error


def _whole(path: Path) -> Checkpoint:
    """A verified one. RunError when another version of Headrace wrote it."""
    fix = "resume with the version of Headrace that wrote it"
    state = (path / STATE).read_bytes()
    try:
        if (found := msgspec.json.decode(state, type=_Format).format) != FORMAT:
            raise RunError(f"checkpoint {path} has format {found}, expected {FORMAT}", origin=str(path), fix=fix)
        return Checkpoint(path, msgspec.json.decode(state, type=RunState))
    except msgspec.DecodeError as error:
        raise RunError(f"checkpoint {path} is whole and not understood: {error}", origin=str(path), fix=fix) from error


def newest(checkpoints: Path, *, in_force: Sequence[str]) -> Checkpoint:
    """The newest that is whole, of those whose names the event log has ``in_force``, oldest first: the log must say
    what a run was resumed from. Those that are damaged are named in the log. RunError when there is none, or when
    another version of Headrace wrote it."""
    there = {path.name: path for path in sorted(checkpoints.glob("version-*"))}
    damaged: list[str] = []
    for path in [there.pop(name) for name in reversed(in_force) if name in there]:
        try:
            verify(path)
        except RunError as error:
            log.warning("%s; an older checkpoint is looked for", error.message)
            damaged.append(path.name)
        else:
            return _whole(path)
    if there:
        raise RunError(
            f"no checkpoint in {checkpoints} is whole and in force: the event log does not say that others were "
            f"written, or has made them void ({', '.join(there)})",
            origin=str(checkpoints.parent),
            fix="put the whole events.jsonl back, or start the job anew",
        )
    if damaged:
        raise RunError(
            f"there is no whole checkpoint in {checkpoints}: all that are left are damaged ({', '.join(damaged)})",
            origin=str(checkpoints.parent),
            fix="put one of them back from a copy, or start the job anew; look at the disk that damaged them",
        )
    raise RunError(
        f"there is no whole checkpoint in {checkpoints}",
        origin=str(checkpoints.parent),
        fix="start the job anew; [checkpoint] every says how often a checkpoint is written",
    )


def settle(path: Path, event_log: Path) -> None:
    """The announcement of ``path`` is on disk: a machine that loses power must not forget the only one that is left.
    RunError when the disk refuses it."""
    try:
        sync(event_log)
    except OSError as error:
        raise _unwritable(path, error) from error


def prune(checkpoints: Path, *, in_force: Sequence[str], keep: int) -> None:
    """Remove all but the newest ``keep`` of those whose names the event log has ``in_force``, oldest first: what a
    resume made void, what was never announced, and what a killed process left half written."""
    kept = [name for name in in_force if (checkpoints / name).is_dir()][-keep:]
    for path in [*checkpoints.glob("version-*"), *checkpoints.glob(f".version-*{PARTIAL}")]:
        if path.name not in kept:
            shutil.rmtree(path)


def _names(checkpoint: Path) -> list[str]:
    """Of every file but the manifest, relative to the checkpoint."""
    files = (path for path in checkpoint.rglob("*") if path.is_file() and path != checkpoint / MANIFEST)
    return sorted(str(path.relative_to(checkpoint)) for path in files)


def _summary(path: Path) -> _File:
    checksum = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            checksum.update(block)
    return _File(path.stat().st_size, checksum.hexdigest())
