"""A directory that a process has for itself as long as it lives, and that the next one removes when it was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = "lock"


class OwnDirectory:
    """A private (mode 0700) and locked directory in ``parent``, whose name begins with ``prefix`` and this process's
    id. Those of processes that were killed before they could remove theirs are removed first."""

    def __init__(self, parent: str, prefix: str) -> None:
        _sweep(Path(parent), prefix)
        self.path = tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent)
        unlocked = Path(self.path) / "unlocked"
        self._lock = unlocked.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(Path(self.path) / _LOCK)  # a lock is seen only when it is held

    def close(self) -> None:
        """Remove it. Twice is fine."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def write_private(path: Path, data: bytes) -> None:
    """No other user may read the file, from its first moment on."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def unlocked(path: str | Path) -> bool:
    """Whether nobody holds a file's lock, or the file is gone. The lock of one that was killed is not held, whatever
    namespace of process ids it lived in."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass
    return True


def _sweep(parent: Path, prefix: str) -> None:
    for lock in parent.glob(f"{prefix}*/{_LOCK}"):
        try:
            if lock.stat().st_uid == os.getuid() and unlocked(lock):
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # somebody else removes it
            continue
