"""How the process of a scoring worker ends, and what is known of it then."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

import pytest

from headrace.services.scoring_process import _gone


@pytest.mark.parametrize(("ends", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -signal.SIGKILL)])
async def test_a_process_that_has_just_ended_by_itself_keeps_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, ends: str, code: int
) -> None:
    """Whoever waits for it, in a thread, may be late: on a busy machine it is."""
    waiting, late = os.waitpid, threading.Event()

    def waits(pid: int, options: int) -> tuple[int, int]:
        late.wait()
        return waiting(pid, options)

    monkeypatch.setattr(os, "waitpid", waits)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", f"import os, sys; {ends}", stdin=asyncio.subprocess.PIPE
    )
    await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    gone = asyncio.create_task(_gone(process, "HEADRACE_SCORING=none"))
    await asyncio.sleep(0)  # it has closed the lifeline and sent its signal
    late.set()
    assert await gone == code
