"""The directory of a run's sockets and node specs, which hold its keys."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "headrace-"
_LOCK = "lock"


class SocketDirectory:
    """Private (mode 0700), and locked as long as this process lives. Those of runs that were killed before they could
    remove theirs are removed first."""

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        unlocked = Path(self.path) / "unlocked"
        self._lock = unlocked.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(Path(self.path) / _LOCK)  # a lock is seen only when it is held

    def close(self) -> None:
        """Remove it. Twice is fine."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _sweep(folder: Path) -> None:
    for lock in folder.glob(f"{PREFIX}*/{_LOCK}"):
        try:
            if lock.stat().st_uid != os.getuid():
                continue
            with lock.open("rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # its run lives, or somebody else removes it
            continue
