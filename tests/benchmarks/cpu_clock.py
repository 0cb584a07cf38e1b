"""CPU seconds of a running process and all its descendants, readable at any past moment (Linux)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

PERIOD = 0.25
"""Seconds between two readings; between them CPU time is taken to pass evenly."""
_TICK = os.sysconf("SC_CLK_TCK")


class CpuClock:
    """Reads in a thread while it is entered. A process that has ended keeps its last reading."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read_on, name="cpu-clock", daemon=True)
        self._readings: list[tuple[float, dict[int, float]]] = []
        self.parents: dict[int, int] = {}
        """Parent of every process seen, by process id."""

    def __enter__(self) -> CpuClock:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> dict[int, float]:
        """CPU seconds by process id between two moments of ``time.time()``."""
        return interpolated(self._readings, begin, end)

    def _read_on(self) -> None:
        while not self._ended.wait(PERIOD):
            now, seconds = time.time(), {}
            for pid, parent, used in _tree(self._root):
                self.parents[pid] = parent
                seconds[pid] = used
            self._readings.append((now, seconds))


def interpolated(readings: Sequence[tuple[float, Mapping[int, float]]], begin: float, end: float) -> dict[int, float]:
    """What each process used between ``begin`` and ``end``. It has used nothing before its first reading, and no more
    after its last one."""
    used = {}
    for pid in {pid for _, seconds in readings for pid in seconds}:
        times = [moment for moment, seconds in readings if pid in seconds]
        values = [seconds[pid] for _, seconds in readings if pid in seconds]
        before, after = np.interp([begin, end], times, values)
        used[pid] = float(after - before)
    return used


def _tree(root: int) -> list[tuple[int, int, float]]:
    """(process id, parent, CPU seconds) of ``root`` and its descendants."""
    everything = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit() and (found := _stat(directory)) is not None:
            everything[int(directory.name)] = found
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in everything.items():
        children.setdefault(parent, []).append(pid)
    members, left = [], [root] if root in everything else []
    while left:
        pid = left.pop()
        members.append((pid, *everything[pid]))
        left += children.get(pid, [])
    return members


def _stat(directory: Path) -> tuple[int, float] | None:
    """(parent, user and system seconds); None when the process is gone."""
    try:
        text = (directory / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # from the state on: the command before it may hold anything
    return int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICK
