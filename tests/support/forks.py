"""Processes forked from the test's: real ones, that can be killed, for the price of a fork."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

PATIENCE = 30.0


class Fork:
    """Does ``work`` in a process of its own, which inherits everything but the test's other threads."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._reading, writing = os.pipe()
        self._child = os.fork()
        if not self._child:
            try:
                said = f"returned {work()!r}"
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writing, said.encode())
            os._exit(0)  # nothing of the test's own may run on here
        os.close(writing)

    def said(self) -> str:
        """What it raised or returned, and "silence" when it does neither in time. It has ended then."""
        answered, _, _ = select.select([self._reading], [], [], PATIENCE)
        said = os.read(self._reading, 4096).decode() if answered else "silence"
        self.kill()
        return said

    def kill(self) -> None:
        """It ends without a word."""
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        os.close(self._reading)
