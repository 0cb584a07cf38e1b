"""The writer of a run's event log (:mod:`headrace.observe.events`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from headrace import clock
from headrace.errors import RunError
from headrace.observe.events import FIELDS, AnyEvent, Event, RunFinished
from headrace.observe.lines import RecordLog, last_line


class EventLog:
    """Writes ``events.jsonl``. Used from one thread; every event is on its way to disk when ``emit`` returns."""

    def __init__(self, path: str | Path, *, after: Event | None = None) -> None:
        """``after``: the last event of a log that is continued in a new epoch; :meth:`reopen` finds it."""
        self._writer = RecordLog(path, append=after is not None)
        self._epoch, self._seq = (0, 0) if after is None else (after.epoch + 1, after.seq + 1)

    @classmethod
    def reopen(cls, path: str | Path) -> Self:
        """Continue the log of a run that is resumed. The next event, ``resumed``, begins a new epoch; a torn last line
        is cut off. RunError when the run was completed, or the log holds no event."""
        line = last_line(path)
        try:
            last = msgspec.json.decode(line, type=AnyEvent)
        except msgspec.DecodeError as error:
            raise RunError(
                f"no event to continue after: {error}",
                origin=str(path),
                fix="a run that wrote nothing cannot be resumed: start it again in a fresh directory",
            ) from error
        if isinstance(last, RunFinished) and last.status == "completed":
            raise RunError(
                "the run is complete: there is nothing to resume",
                origin=str(path),
                fix="read its report, or start another run",
            )
        return cls(path, after=last)

    @property
    def count(self) -> int:
        """Events in the file, void ones included: the ``seq`` of the next."""
        return self._seq

    def emit(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Append one event and return it as observers see it. ValueError for an unknown kind or for fields other
        than its own; RunError when the disk refuses it."""
        if fields.keys() != FIELDS.get(kind):
            raise _misuse(kind, fields)
        event = {"seq": self._seq, "time": clock.now(), "epoch": self._epoch, "kind": kind, **fields}
        self._writer.write(event)
        self._seq += 1
        return event

    def close(self) -> None:
        """May be called twice."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _misuse(kind: str, fields: Mapping[str, Any]) -> ValueError:
    if kind not in FIELDS:
        return ValueError(f"no event kind {kind!r}; kinds: {', '.join(sorted(FIELDS))}")
    missing, extra = FIELDS[kind] - fields.keys(), fields.keys() - FIELDS[kind]
    return ValueError(f"event {kind}: missing fields {sorted(missing)}, unknown fields {sorted(extra)}")
