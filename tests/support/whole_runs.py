"""Watching a started `headrace run` from outside."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
    path = run.directory / "events.jsonl"
    while run.process.poll() is None:
        begun = not after
        for line in path.read_text().splitlines() if path.exists() else []:
            if begun and f'"kind":"{kind}"' in line and of in line and line.endswith("}"):
                return json.loads(line)
            begun = begun or after in line
        os.sched_yield()
    raise AssertionError(f"the run ended before {kind}: {run.process.communicate()}")


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
