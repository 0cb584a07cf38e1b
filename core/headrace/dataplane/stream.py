"""A training rank's view of a consumer: micro-batches one after another, fetched ahead, acknowledged together.

    stream = Stream(lambda: DataPlane(address).partition("phase"), "train", step_groups=32, token_budget=4096)
    for micro_batch in stream.step():
        ...
    stream.acknowledge()  # after the optimiser step

A thread leases and fetches while the rank computes. What was not acknowledged when the rank dies is given out again
once its leases expire: it restarts at its last acknowledged step. With ``rank`` and ``ranks`` the micro-batches are
shares of batches that all ranks take part in, and every process that says it is the same rank gets the same.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from numbers import Integral
from time import monotonic
from typing import NamedTuple, Self

from headrace.contract import Batch
from headrace.dataplane.asking import check_wait
from headrace.dataplane.messages import Share
from headrace.dataplane.ordering import Order
from headrace.dataplane.partition_client import LEASE_SECONDS, Partition
from headrace.dataplane.rows import Rows
from headrace.errors import ContractError, DeadlineError, LostRowsError, RunError, SilenceError, WireError

_TURN_SECONDS = 0.5
"""How late the thread notices that it is to stop, or that a lease is to be extended."""
_CLOSE_SECONDS = 5.0
"""For the ledger to take back what a stream gives up."""


class _Fetched(NamedTuple):
    rows: Rows
    batch: Batch


class Stream:
    """ContractError for ``step_groups`` or ``ahead`` below 1.

    ``connect``: the partition as one thread sees it; called twice. ``step_groups``: groups of one optimiser step.
    ``token_budget``: of one micro-batch, 0 for none; it has what is ready when it is fetched, at least one group.
    ``ahead``: micro-batches that are fetched before they are asked for. ``seconds``: how long leases outlive this
    process; they are extended while it lives. ``ranks``: data-parallel ranks that share each micro-batch: groups of a
    step are those of all of them, the token budget is each one's. ``order``: as of :meth:`Partition.lease`."""

    def __init__(
        self,
        connect: Callable[[], Partition],
        consumer: str,
        *,
        step_groups: int,
        columns: Sequence[str] | None = None,
        token_budget: int = 0,
        min_version: int = 0,
        ahead: int = 2,
        seconds: float = LEASE_SECONDS,
        rank: int = 0,
        ranks: int = 1,
        order: Order | None = None,
    ) -> None:
        if not all(isinstance(number, Integral) and number >= 1 for number in (step_groups, ahead)):
            raise ContractError(
                f"a stream of {step_groups} groups a step, {ahead} micro-batches ahead",
                fix="both are at least 1, and whole",
            )
        if not all(isinstance(number, Integral) for number in (rank, ranks)) or not 0 <= rank < ranks:
            raise ContractError(
                f"a stream of rank {rank} of {ranks}", fix="ranks are counted from 0, and are at least 1"
            )
        self._consumer = consumer
        self._step_groups = step_groups
        self._seconds = seconds
        self._rank, self._ranks = rank, ranks
        self._process = os.getpid()
        self._desk, self._source = connect(), connect()
        if not isinstance(self._source, Partition):
            raise ContractError(
                f"connect of a stream gave a {type(self._source).__name__}",
                fix='have it give a partition: Stream(lambda: DataPlane(address).partition("phase"), ...)',
            )
        self._take = partial(
            self._source.take,
            consumer,
            columns=columns,
            at_least=1,
            token_budget=token_budget,
            min_version=min_version,
            seconds=seconds,
            order=order,
            deadline=_TURN_SECONDS,
        )
        self._fetched: queue.Queue[_Fetched | BaseException] = queue.Queue(maxsize=ahead)
        self._missing = 0
        """Groups that the rank's step still lacks."""
        self._given: list[Rows] = []
        """To the rank, and not acknowledged yet."""
        self._held: dict[int, tuple[Rows, float]] = {}
        """Every lease, and when it is to be extended."""
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"stream of {consumer}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the rank

    def step(self, *, deadline: float = 3600.0) -> Iterator[Batch]:
        """The micro-batches of one optimiser step, valid until they are acknowledged: see :meth:`Partition.get`.
        DeadlineError when one does not come in time; then, and when a step was left early, the next call goes on with
        what it still lacks, so that each has ``step_groups``. Whatever ended the fetching is raised here: SilenceError,
        which names it, when the ledger does not answer any more. RunError after :meth:`close`."""
        check_wait(deadline)
        if self._missing <= 0:
            self._missing = self._step_groups
        while self._missing > 0:  # ranks that begin within a step of those before them may get more
            fetched = self._next(deadline)
            self._missing -= fetched.rows.groups
            self._given.append(fetched.rows)
            yield fetched.batch

    def _next(self, deadline: float) -> _Fetched:
        if self._process != os.getpid():  # where the thread is not, and nothing comes
            raise WireError(
                f"the stream of {self._consumer} was made by process {self._process}, from which this one was forked",
                fix="make another in this process",
            )
        self._require_open()
        try:
            fetched = self._fetched.get(timeout=deadline)
        except queue.Empty:
            raise DeadlineError(f"no micro-batch for {self._consumer} came within {deadline:g} s") from None
        if isinstance(fetched, BaseException):
            self._fetched.put_nowait(fetched)  # for whoever asks again: the thread has ended
            raise fetched
        return fetched

    def acknowledge(self) -> None:
        """The rank is done with all it was given. RunError, and nothing acknowledged, when one of the leases had ended:
        its rows are given out again, so what was made of this step must not be used, and the others are given back:
        none can be acknowledged with a later step. So it is after :meth:`close`, which gave them back."""
        self._require_open()
        try:
            for rows in self._given[1:]:  # the first says so by itself
                self._desk.extend(rows, self._seconds)
            while self._given:
                self._desk.acknowledge(self._given[0])
                self._forget(self._given.pop(0))
        except RunError:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Give back what the rank was given."""
        given = self._given[::-1]  # what is given back last comes first
        self._given.clear()
        for rows in given:
            self._forget(rows)
        self._give_back(given)

    def _give_back(self, held: Sequence[Rows]) -> None:
        with suppress(WireError):  # nobody answers: leases expire, and whoever ends them has other worries
            for rows in held:
                with suppress(RunError):  # it expired: the rows are another's
                    self._desk.release(rows, deadline=_CLOSE_SECONDS)

    def close(self) -> None:
        """What is not acknowledged is given back, to be leased again in its order. Twice is fine. In a forked process
        it does nothing: the leases are the other's."""
        if self._process != os.getpid():
            return
        self._ending.set()
        self._thread.join()
        with self._lock:
            held = [rows for rows, _ in self._held.values()]
            self._held.clear()
        self._given.clear()
        self._give_back(held[::-1])

    def _require_open(self) -> None:
        if self._ending.is_set():
            raise RunError(
                f"the stream of {self._consumer} was closed: what was not acknowledged is given out again",
                fix="make another stream, and acknowledge a step before the stream is closed",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _forget(self, rows: Rows) -> None:
        with self._lock:
            self._held.pop(rows.lease, None)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            missing = self._step_groups
            batch = self._source.first_batch(self._consumer) if self._ranks > 1 else 0
            while not self._ending.is_set():
                fetched = self._fetch(missing, batch)
                if fetched is not None and self._hand_over(fetched):
                    batch += 1
                    missing -= fetched.rows.groups
                    missing = missing if missing > 0 else self._step_groups
        except BaseException as error:  # this thread's supervisor: the rank is told instead of waiting for ever
            while not (self._ending.is_set() or self._offer(error)):
                pass  # an offer waits; leases are not extended any more, which may be what failed

    def _fetch(self, groups: int, batch: int) -> _Fetched | None:
        self._extend()
        try:
            share = Share(batch, self._rank, self._ranks) if self._ranks > 1 else None
            rows, values = self._take(groups, share=share)
        except SilenceError:  # of the ledger, which says within a turn that there is nothing
            raise
        except (DeadlineError, LostRowsError):  # those of the groups that were not lost are ready again
            return None
        with self._lock:
            self._held[rows.lease] = (rows, monotonic() + self._seconds / 2)
        return _Fetched(rows, values)

    def _hand_over(self, fetched: _Fetched) -> bool:
        while not self._ending.is_set():
            if self._offer(fetched):
                return True
            self._extend()
        return False

    def _offer(self, fetched: _Fetched | BaseException) -> bool:
        """Whether there was room within a turn."""
        try:
            self._fetched.put(fetched, timeout=_TURN_SECONDS)
        except queue.Full:
            return False
        return True

    def _extend(self) -> None:
        now = monotonic()
        with self._lock:
            due = [rows for rows, when in self._held.values() if when <= now]
            for rows in due:
                try:
                    self._source.extend(rows, self._seconds)
                except RunError as error:
                    error.fix = (
                        "do not use what was not acknowledged; close this stream and make another Stream: it is given "
                        "those rows again"
                    )
                    raise
                self._held[rows.lease] = (rows, now + self._seconds / 2)
