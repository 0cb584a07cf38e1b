"""The processes of ranks 1 and above: started, spoken with, and ended by rank 0.

Invariant: none outlives rank 0. A normal end closes their sockets, on which they wait; of a killed rank 0 they learn by
that, and the kernel ends those that are busy.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from headrace.contract.training import TrainingContext
from headrace.errors import EngineError
from headrace.process import die_with_parent, is_stopped
from headrace.wire import Failure, RefusedError, encode
from headrace_torch.ranks.channel import Channel, Closed, Frames
from headrace_torch.ranks.orders import Done, RankSettings, Setup

START_SECONDS = 300.0
"""In which a rank has imported what it needs."""
_LAST_WORDS_SECONDS = 5.0
"""In which a rank that has failed says so, and one that is told to end does."""


class LostRankError(Exception):
    """Rank 0 cannot go on with the others; the message names who and why."""


class Other:
    """One of them."""

    def __init__(self, setup: Setup) -> None:
        """Start it; it says ``Done`` when it is there, and when it has loaded the model. EngineError when it cannot
        be started."""
        self.rank, self._seconds = setup.rank, setup.settings.rank_deadline
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "headrace_torch.ranks.rank", str(theirs.fileno())],
                    env={**os.environ, "OMP_NUM_THREADS": str(setup.threads)},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    # Without a gap in which it could outlive us: one C call, looked up before the fork.
                    preexec_fn=functools.partial(die_with_parent, os.getpid()),
                )
            except OSError as error:
                ours.close()
                raise EngineError(
                    f"rank {self.rank} cannot be started: {error}", origin=setup.name, fix="free memory and processes"
                ) from error
        self.send(encode(setup))

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def send(self, message: Frames) -> None:
        """LostRankError when it is gone or takes nothing."""
        try:
            self._channel.send(message, seconds=self._seconds)
        except Closed:
            self._gone()
        except TimeoutError:
            raise LostRankError(self._silent(self._seconds)) from None

    def reply(self, *, seconds: float | None = None) -> Done | Failure:
        """LostRankError when it is gone or says nothing for so long."""
        wait = self._seconds if seconds is None else seconds
        try:
            reply: Done | Failure = self._channel.receive(Done | Failure, seconds=wait)
            return reply
        except Closed:
            self._gone()
        except TimeoutError:
            raise LostRankError(self._silent(wait)) from None
        except RefusedError as error:
            raise LostRankError(f"rank {self.rank} (process {self.pid}) answered nonsense: {error.message}") from error

    def _gone(self) -> NoReturn:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_SECONDS)
        status = self._process.returncode
        if status is None:
            how = "closed its socket"
        elif status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        raise LostRankError(f"rank {self.rank} (process {self.pid}) {how}")

    def _silent(self, seconds: float) -> str:
        stopped = ": it is stopped (SIGSTOP)" if is_stopped(self.pid) else ""
        return f"rank {self.rank} (process {self.pid}) did not answer for {seconds:.3g} s{stopped}"

    def last_words(self, *, until: float) -> tuple[bool, str]:
        """Whether its process has ended without a word, and what it says or is said of it."""
        try:
            reply = self.reply(seconds=max(0.1, until - time.monotonic()))
        except LostRankError as error:
            return self._process.poll() is not None, str(error)
        return False, f"rank {self.rank}: {reply.message}" if isinstance(reply, Failure) else ""

    def close(self) -> None:
        """Have it end."""
        self._channel.close()

    def end(self, *, until: float) -> None:
        """Wait for it, and kill it at that time (of ``time.monotonic``)."""
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Others:
    """All of them, in order of rank. ``setup``: rank 0's own."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._all: list[Other] = []
        try:
            for rank in range(1, len(setup.settings.shares)):
                self._all.append(Other(msgspec.structs.replace(setup, rank=rank)))
        except BaseException:  # whatever it was, those that were started must not be left; raised again
            self.close(kill=True)
            raise

    @property
    def pids(self) -> list[int]:
        """Of their processes."""
        return [other.pid for other in self._all]

    def have_met(self) -> None:
        """The file over which the ranks found one another goes."""
        shutil.rmtree(Path(self.setup.rendezvous).parent, ignore_errors=True)

    def send(self, messages: Sequence[Frames]) -> None:
        """To each its own."""
        for other, message in zip(self._all, messages, strict=True):
            other.send(message)

    def replies(self, *, seconds: float | None = None) -> list[Done | Failure]:
        """One of each, after ``seconds`` at most (None: as set). LostRankError names who is gone."""
        return [other.reply(seconds=seconds) for other in self._all]

    def why(self, own: str) -> str:
        """Why the ranks are out of step: who was lost, or else what all say, rank 0 its ``own`` words."""
        until = time.monotonic() + _LAST_WORDS_SECONDS
        words = [other.last_words(until=until) for other in self._all]
        lost = [text for gone, text in words if gone]
        return "; ".join(lost or [own, *(text for _, text in words if text)])

    def close(self, *, kill: bool = False) -> None:
        """Nobody is left then; twice is fine."""
        self.have_met()
        for other in self._all:
            other.close()
        until = time.monotonic() + (0.0 if kill else _LAST_WORDS_SECONDS)
        for other in self._all:
            other.end(until=until)
        self._all = []


def start_others(shard: str, settings: RankSettings, context: TrainingContext) -> Others:
    """Start the processes of ranks 1 and above. ``shard``: as of :class:`Setup`. EngineError when one cannot be
    started."""
    directory = tempfile.mkdtemp(prefix="headrace-ranks-")
    return Others(
        Setup(
            shard=shard,
            settings=settings,
            name=context.name,
            model_path=context.model_path,
            seed=context.seed,
            threads=context.threads,
            total_steps=context.total_steps,
            values=context.values,
            rank=0,
            rendezvous=f"{directory}/meeting",
            import_path=sys.path,
        )
    )
