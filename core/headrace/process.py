"""What a process asks of the system: not to outlive the one that started it, and whether others live or listen.

Invariant: after :func:`die_with_parent` has returned, the death of the parent, by any signal, is this
process's death. Linux only; elsewhere it does nothing, and a killed parent leaves its children behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_ANSWER_SECONDS = 1.0

# Found at import: between fork and exec nothing may be looked up or imported.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_prctl = None if _libc is None else _libc.prctl


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends. ``parent``: the pid of the process that started this one; when
    that has ended already, this process ends here.

    The kernel means the parent's *thread*: start children from a thread that lives as long as the process. Call it
    first thing in a child; it does not extend to grandchildren, which call it themselves.
    """
    if _prctl is None:
        return
    if _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine was stopped (SIGSTOP). Linux only; elsewhere never."""
    try:
        # pid (name) state …: a name may hold blanks and brackets.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def is_listened_at(path: str) -> bool:
    """Whether a process listens at this socket of the file system: a second one there would silently take it over. One
    that a dead process left behind, and what is no socket, nobody listens at."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_ANSWER_SECONDS)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def kill_marked(mark: str) -> None:
    """Kill every process that was started with ``mark`` (``NAME=value``) in its environment, or was forked by one that
    was: for those whose parent was killed before it could end them. Linux only; elsewhere it does nothing."""
    killed: set[int] = set()
    while found := set(_marked(mark.encode())) - killed:  # once more: one of them may have forked meanwhile
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found


def _marked(mark: bytes) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark in entry.read_bytes().split(b"\0"):
                yield int(entry.parent.name)
