"""Which events of a resumed run are void.

A run that is resumed goes on from the state that a checkpoint saved; what had happened since is not undone in the file
but void. A later resume may return to a checkpoint from before an earlier one, which is void then itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

import msgspec

from headrace.observe.events import EVENTS_FILE, AnyEvent, CheckpointSaved, Resumed, read_events
from headrace.observe.lines import LineReader


class VoidEvents:
    """The ranges of void events of a log: ``seq in void`` says whether one is."""

    def __init__(self, resumes: Iterable[Resumed]) -> None:
        """``resumes``: every resume of the log, in order."""
        ranges: list[range] = []
        for resumed in reversed(list(resumes)):
            if not ranges or resumed.seq < ranges[-1].start:
                ranges.append(range(min(resumed.events, resumed.seq), resumed.seq))
        self.ranges = tuple(reversed(ranges))
        """Disjoint, ascending; each ends before the ``resumed`` event that made it void."""

    def __contains__(self, seq: int) -> bool:
        return any(seq in void for void in self.ranges)


def void_events(path: str | Path) -> VoidEvents:
    """Of a log or a run directory. RunError when it cannot be read."""
    path = Path(path)
    return VoidEvents(
        event
        for event in LineReader(path / EVENTS_FILE if path.is_dir() else path, _resumed)
        if isinstance(event, Resumed)
    )


def _resumed(line: bytes) -> AnyEvent | None:
    """Decodes what may be a resume; of a log's millions of lines hardly one is."""
    return msgspec.json.decode(line, type=AnyEvent) if b'"resumed"' in line else None


def standing_events(path: str | Path) -> Iterator[AnyEvent]:
    """The events of a log or a run directory that are in force, in order. RunError as :func:`read_events`."""
    void = void_events(path)
    return (event for event in read_events(path) if event.seq not in void)


def standing_checkpoints(path: str | Path) -> list[str]:
    """Names of the checkpoints of a log or a run directory whose states are in force, oldest first. The report of one
    may be void all the same: a resume makes the very report void that it relies on. RunError as :func:`read_events`."""
    told = [event for event in read_events(path) if isinstance(event, CheckpointSaved | Resumed)]
    void = VoidEvents(event for event in told if isinstance(event, Resumed))
    return [
        PurePath(event.path).name
        for event in told
        if isinstance(event, CheckpointSaved) and event.events - 1 not in void
    ]
