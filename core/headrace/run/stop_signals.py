"""The signals that ask a run to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self


class StopSignals:
    """SIGINT, SIGTERM, and SIGHUP of a terminal that is closed, unless whoever started the process had it ignored
    (``nohup``). Within ``with`` none of them interrupts anything: one is kept until somebody is told of it."""

    def __init__(self) -> None:
        self._heard: list[str] = []
        self._tell: Callable[[str], object] = self._heard.append
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def telling(self, stop: Callable[[str], None]) -> Iterator[None]:
        """Call ``stop`` in the running loop with the name of each signal, first of those that came before."""
        loop = asyncio.get_running_loop()
        self._tell = lambda name: loop.call_soon_threadsafe(stop, name)
        for name in self._heard:
            stop(name)
        self._heard.clear()
        try:
            yield
        finally:
            self._tell = self._heard.append

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._tell(signal.Signals(number).name)
