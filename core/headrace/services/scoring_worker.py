"""A scoring worker: a guard process, and inside its reach the process that runs foreign reward code.

    pool ──stdin (lifeline)──> guard ──fork──> scorer ──socket pair──> pool
                                 └─<── stdout and stderr of the scorer and all it starts

The guard runs no foreign code. It ends the scorer when the lifeline closes, which a pool does to kill it and the
kernel does when the pool's process dies, and it ends when the scorer does. Before it ends it kills everything the
scorer ever started: the scorer's process group, and, as the subreaper (Linux) of all orphans below it, whatever
left that group. Output is passed on until the log is full, and read and forgotten from then on.

Invariant: when the guard has ended, no process that the scorer started is left (elsewhere than on Linux: none of
its process group). A guard that is killed itself takes the scorer with it; the pool finds what that started.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LOG_BYTES = 4 << 20
"""A log that has reached this size takes no more output of scoring workers."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_FULL = b"\n[the log is full: further output of scoring workers is dropped]\n"


def main(socket_fd: int) -> int:
    """Fork the scorer and guard it. Standard input is the lifeline, standard error the log. Returns its exit code."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)  # a guard that is stopped would not see its lifeline close
    wake = _wake_on_child_end()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    reading, writing = os.pipe()
    guard = os.getpid()
    scorer = os.fork()
    if scorer == 0:
        _become_scorer(guard, socket_fd, writing)
    # Both sides set the group: neither may run ahead of it.
    _ignore_gone(os.setpgid, scorer, scorer)
    os.close(writing)
    os.close(socket_fd)
    try:
        _pass_output_until_the_end(scorer, reading, wake)
    finally:
        code = _kill_all(scorer)
    _drain(reading)
    return code


def _wake_on_child_end() -> int:
    """A descriptor that becomes readable when a child ends."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.set_blocking(reading, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing)
    return reading


def _pass_output_until_the_end(scorer: int, output: int, wake: int) -> None:
    """Returns when the lifeline is closed or the scorer has ended; the scorer is not reaped."""
    lifeline = 0
    os.set_blocking(output, False)
    watched = [lifeline, output, wake]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if output in ready and not _pass_on(output):
            watched.remove(output)  # the scorer has closed its output; it may live on
        if lifeline in ready and not os.read(lifeline, 1):
            return
        if wake in ready:
            os.read(wake, 1 << 10)
            if _has_ended(scorer):
                return


def _has_ended(scorer: int) -> bool:
    """Reaps adopted orphans that have ended, and looks whether the scorer has."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if ended.si_pid == scorer:
            return True
        os.waitpid(ended.si_pid, 0)
    return False


def _kill_all(scorer: int) -> int:
    """Kill the scorer and all descendants. Its exit code, or 128 + the signal that ended it."""
    code = 0
    _ignore_gone(os.killpg, scorer, signal.SIGKILL)
    while True:
        for child in _children():
            _ignore_gone(os.kill, child, signal.SIGKILL)
        try:
            # The orphans that a death leaves become children of this process, seen in the next round.
            pid, status = os.waitpid(-1, 0)
            while pid:
                if pid == scorer:
                    ended = os.waitstatus_to_exitcode(status)
                    code = ended if ended >= 0 else 128 - ended
                pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code


def _children() -> list[int]:
    """Children of this process, where /proc tells."""
    me, found = str(os.getpid()), []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state parent …: a name may hold blanks and brackets.
            parent = entry.read_bytes().rpartition(b")")[2].split()[1]
        except (OSError, IndexError):
            continue  # it has ended meanwhile
        if parent.decode() == me:
            found.append(int(entry.parent.name))
    return found


def _drain(output: int) -> None:
    """What was written just before the end is often the reason for it."""
    with suppress(BlockingIOError):
        while _pass_on(output):
            pass


def _pass_on(output: int) -> bool:
    """Read some output and log it, while the log has room. False at its end."""
    data = os.read(output, 1 << 16)
    room = LOG_BYTES - os.fstat(2).st_size
    if data and room > 0:
        with suppress(OSError):  # a full disk must not end the guard
            os.write(2, data if len(data) <= room else data[:room] + _FULL)
    return bool(data)


def _ignore_gone(call: Callable[..., None], *arguments: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it has ended, or (macOS) is a zombie
        call(*arguments)


def _become_scorer(guard: int, socket_fd: int, output: int) -> None:
    """In the forked child: cut it off from the guard's descriptors and score until the socket closes."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        from headrace.process import die_with_parent

        die_with_parent(guard)
        os.dup2(output, 1)
        os.dup2(output, 2)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.closerange(3, socket_fd)
        os.closerange(socket_fd + 1, 256)
        from headrace.services.scorer import score_until_closed

        code = score_until_closed(socket_fd)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
