"""One scoring worker as its pool sees it: launched, given requests, killed.

Invariant: after :meth:`ScoringProcess.kill` nothing that the worker started is left (see
:mod:`headrace.services.scoring_worker`), and a launch that fails or is cancelled leaves nothing either.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import BinaryIO, Literal, TypeAlias

from headrace import errors
from headrace.errors import ContractError, HeadraceError, RunError
from headrace.process import kill_marked
from headrace.services.scoring_messages import REPLY_BYTES, Raised, Reply, ScoringSetup, Unpacker, pack
from headrace.wire import decode
from headrace.wire.refusal import RefusedError

START_DEADLINE = 120.0
"""Seconds for a worker to import and start its environment."""
END_DEADLINE = 10.0
"""Seconds for a worker to be gone once it was told to end."""

Ended = Literal["done", "deadline", "lost"]
OnReply: TypeAlias = Callable[[Reply], None]


class ScoringProcess(asyncio.Protocol):
    """Use :meth:`launch`."""

    def __init__(self) -> None:
        self._unpacker = Unpacker(limit=REPLY_BYTES)
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._waiting: deque[OnReply] = deque()
        self._ended: asyncio.Future[Ended] | None = None
        self._progress = 0.0
        self._timer: asyncio.TimerHandle
        self._watching: asyncio.Task[None]
        self._mark = f"HEADRACE_SCORING={secrets.token_hex(16)}"
        """In the environment of all that the worker starts."""
        self.lost = False
        """It has ended, or said what no worker says; only :meth:`kill` is left."""
        self.untold = False
        """Whether it was lost by itself, and nobody was told so."""

    @classmethod
    async def launch(cls, *, python: str, setup: ScoringSetup, log_path: str) -> ScoringProcess:
        """A worker with its environment started. Raises the environment's own HeadraceError, ContractError for any
        other exception of its, RunError when it ends or stays silent."""
        worker = cls()
        try:
            await worker._spawn(python, log_path)
            replies: list[Reply] = []
            ended, _ = await worker.run([(pack(setup), replies.append)], deadline=START_DEADLINE)
            if ended != "done":
                code = await worker.kill()
                what = f"ended ({describe(code)})" if ended == "lost" else f"said nothing for {START_DEADLINE:.0f} s"
                raise RunError(
                    f"a scoring worker {what} before its environment was started",
                    origin=f"{python} -m headrace.services.scoring_worker",
                    fix=f"read {log_path}" if log_path else "run the environment's start by hand",
                )
            if isinstance(replies[0], Raised):
                raise _error_of(replies[0])
        except OSError as error:
            await worker.kill()
            raise RunError(
                f"a scoring worker could not be started: {error}",
                origin=python,
                fix="correct the interpreter, or free processes and memory",
            ) from error
        except BaseException:  # cancelled too: no launch leaves a process; raised again
            await worker.kill()
            raise
        return worker

    async def run(self, requests: Sequence[tuple[bytes, OnReply]], *, deadline: float) -> tuple[Ended, int]:
        """Send requests and hand each reply, in order, to the request's callback. Returns how many were answered, and
        why it ended: ``done``, all of them; ``deadline``, the next reply took more than ``deadline`` seconds;
        ``lost``, the worker has ended."""
        if self.lost or self._transport is None:
            return "lost", 0
        loop = asyncio.get_running_loop()
        self._waiting.extend(on_reply for _, on_reply in requests)
        self._ended = loop.create_future()
        self._progress = loop.time()
        self._arm(deadline, deadline)
        self._transport.writelines([request for request, _ in requests])
        try:
            ended = await self._ended
            return ended, len(requests) - len(self._waiting)
        finally:
            self._timer.cancel()
            self._ended = None
            self._waiting.clear()

    async def kill(self) -> int | None:
        """End the worker and everything it started. Its exit code, 128 + signal, or None when it does not go."""
        self._lose()
        if self._process is None:
            return None
        ending = asyncio.ensure_future(_gone(self._process, self._mark))
        try:
            return await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending  # who is cancelled leaves nothing behind either
            raise

    # ------------------------------------------------------------ the connection

    def data_received(self, data: bytes) -> None:
        try:
            for frames in self._unpacker.feed(data):
                reply: Reply = decode(frames, Reply)  # type: ignore[arg-type]  # a union is a type to msgspec
                if not self._waiting:
                    raise ValueError("a reply that nobody waits for")
                self._progress = asyncio.get_running_loop().time()
                self._waiting.popleft()(reply)
                if not self._waiting:
                    self._end("done")
        except (ValueError, RefusedError):
            self._die()

    def connection_lost(self, exc: Exception | None) -> None:
        self._die()
        self._end("lost")

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """A killed guard leaves what its scorer has forked, which may hold the connection open. One that ends by itself
        leaves nothing: then the connection ends, after the last reply."""
        if await process.wait() < 0:
            self._die()

    def _die(self) -> None:
        self.untold = self.untold or not self.lost
        self._lose()

    def _lose(self) -> None:
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    def _end(self, how: Ended) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(how)

    def _arm(self, seconds: float, deadline: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check, deadline)

    def _check(self, deadline: float) -> None:
        """End the run if no reply came for ``deadline`` seconds. One that has arrived was read before timers fire."""
        left = self._progress + deadline - asyncio.get_running_loop().time()
        if left <= 0:
            self._end("deadline")
        else:
            self._arm(left, deadline)

    async def _spawn(self, python: str, log_path: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs, _log(log_path) as log:
            try:
                ours.setblocking(False)
                self._process = await asyncio.create_subprocess_exec(
                    python,
                    *("-m", "headrace.services.scoring_worker", str(theirs.fileno())),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env=os.environ | dict([self._mark.split("=")]),
                )
                self._watching = asyncio.create_task(self._watch(self._process))
                loop = asyncio.get_running_loop()
                self._transport, _ = await loop.create_unix_connection(lambda: self, sock=ours)
            except BaseException:  # cancelled too: nobody else knows of our end of the pair; raised again
                ours.close()
                raise


async def _gone(process: asyncio.subprocess.Process, mark: str) -> int | None:
    """Close the lifeline and wait; a guard that does not go is killed itself. What a killed guard leaves is found by
    its mark."""
    if process.stdin is not None:
        process.stdin.close()
    _send(process, signal.SIGCONT)  # a guard that was stopped could not see it
    code: int | None = None
    with suppress(TimeoutError):
        code = await asyncio.wait_for(process.wait(), END_DEADLINE)
    if code is None:
        _send(process, signal.SIGKILL)
    if code is None or code < 0:
        await asyncio.to_thread(kill_marked, mark)
    return code


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Not by ``process.send_signal``, which takes the exit code of a process that has ended away from who waits for it:
    asyncio then says 255."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _log(path: str) -> BinaryIO:
    return open(path or os.devnull, "ab")


def was_killed(code: int | None) -> bool:
    """Whether a worker with this exit code was killed, perhaps from outside: by a person or for memory."""
    return _signal(code) in (signal.SIGKILL, signal.SIGTERM)


def describe(code: int | None) -> str:
    """A worker's exit code in words."""
    if code is None:
        return "it could not be ended"
    number = _signal(code)
    if not number:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"


def _signal(code: int | None) -> int:
    """What ended the scorer, by its guard's word (128 + signal), or the guard itself (-signal); 0 for an exit."""
    if code is None:
        return 0
    return -code if code < 0 else max(code - 128, 0)


def _error_of(raised: Raised) -> HeadraceError:
    """The exception that stopped an environment's start, as its class where the class is Headrace's own."""
    kind = getattr(errors, raised.error, None)
    if isinstance(kind, type) and issubclass(kind, HeadraceError):
        return kind(raised.message, origin=raised.origin, fix=raised.fix)
    return ContractError(
        f"the environment could not start: {raised.message}\n{raised.detail}",
        fix="raise ConfigError from start() for what the job file's author can correct",
    )
