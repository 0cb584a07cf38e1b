"""Watching a started `headrace run` from outside."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

LOOK_SECONDS = 0.01


def events(run: Any, *kinds: str) -> list[dict[str, Any]]:
    lines = (run.directory / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] in kinds]


PHASE_TWO = '"phase":"rl"'


def pid_of(run: Any, node: str) -> int:
    """Of the node's newest process."""
    return [event for event in events(run, "node_started") if event["node"] == node][-1]["pid"]


def follow(run: Any, kind: str, *, after: str = "", of: str = "") -> dict[str, Any]:
    """Block until the run has logged an event of this kind, with the text ``of``, after a line with this text; the log
    is read as it grows."""
    log, begun = Growing(run.directory / "events.jsonl"), not after
    while run.process.poll() is None:
        for line in log.new_lines():
            if begun and f'"kind":"{kind}"' in line and of in line:
                return json.loads(line)
            begun = begun or after in line
        with suppress(subprocess.TimeoutExpired):  # the run is to have the cores meanwhile
            run.process.wait(LOOK_SECONDS)
    raise AssertionError(f"the run ended before {kind}: {run.process.communicate()}")


class Growing:
    """A log that others write."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new_lines(self) -> list[str]:
        """Whole ones that were not told before."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + 1 if whole else 0
        return whole.decode().splitlines()


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and not _zombie(pid)]


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def descendants(pid: int) -> list[int]:
    """Every process below ``pid``, whatever its session."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue

    def below(root: int) -> Iterator[int]:
        for child, parent in parents.items():
            if parent == root:
                yield child
                yield from below(child)

    return list(below(pid))
