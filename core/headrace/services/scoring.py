"""Scoring in processes that can be killed: a reward may loop, crash, print or fork, and costs its own score only.

    score_many ─> queue ─> one slot per worker ─> worker process ─> one outcome per episode

A slot hands its worker a few episodes at a time and expects the replies in order, each within the deadline; so
the first episode without a reply is the one to blame. Its worker is killed with everything it started and
replaced, and the episodes behind it are queued again. What a worker was scoring when it was killed is scored once
more, since the kill may have come from outside.

| the reward …                           | outcome                                          |
|----------------------------------------|--------------------------------------------------|
| returns a number                       | the score                                        |
| returns NaN                            | failure ``unscored``                             |
| raises, calls sys.exit, returns else   | failure ``exception``, reason = exception's class|
| takes longer than the deadline         | failure ``deadline``, worker replaced            |
| ends the process, or is killed twice   | failure ``crash``, worker replaced               |
| prints                                 | output to the log, up to a bound                 |
| leaves processes behind                | they end with its worker, at the latest          |

Invariant: every episode gets exactly one outcome; and a pool that is closed, or whose process has died, leaves no
process behind.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from headrace.contract import Environment, EnvironmentContext, Episode, Score, Task
from headrace.errors import HeadraceError
from headrace.registry import PluginSpec, build
from headrace.services.scoring_messages import Raised, Reply, Scored, ScoringRequest, ScoringSetup, pack
from headrace.services.scoring_process import Ended, ScoringProcess, describe, was_killed

BATCH = 32
"""Episodes handed to a worker at once, at most."""
HANDOUT_SECONDS = 0.01
"""Work handed to a worker at once, at the pace of its last: more would wait there while another worker is idle."""

FailureKind = Literal["exception", "deadline", "crash", "unscored"]


class ScoringFailure(Exception):
    """Why an episode has no score. ``reason`` is for counting: the exception's class, or the kind; ``detail`` is the
    traceback or a sentence."""

    def __init__(self, reason: str, *, kind: FailureKind, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.kind = kind
        self.detail = detail


Outcome = Score | ScoringFailure


def build_environment(*, spec: Mapping[str, Any], context: EnvironmentContext) -> Environment:
    """The factory of a job's workers: the plugin that ``spec`` (a :class:`PluginSpec` as plain values) selects,
    started."""
    environment = build(msgspec.convert(spec, PluginSpec))
    assert isinstance(environment, Environment)
    environment.start(context)
    return environment


class _Item:
    """One episode on its way: the packed request, and the future that its caller waits for."""

    __slots__ = ("failed", "outcome", "request", "tried")

    def __init__(self, request: bytes, failed: Callable[[ScoringFailure], None]) -> None:
        self.request = request
        self.failed = failed
        self.tried = False
        """Whether a process was killed while it scored this."""
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def resolve(self, outcome: Outcome) -> None:
        if self.outcome.done():  # a caller that was cancelled has cancelled it
            return
        self.outcome.set_result(outcome)
        if isinstance(outcome, ScoringFailure):
            self.failed(outcome)

    def answer(self, reply: Reply) -> None:
        self.resolve(_outcome(reply))


class ScoringPool:
    """``workers`` killable processes that score episodes. Call :meth:`start` first and :meth:`close` last."""

    def __init__(
        self,
        *,
        python: str,
        factory: str,
        arguments: Mapping[str, Any],
        context: EnvironmentContext,
        workers: int,
        deadline: float,
        log_path: str = "",
        lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """``python``: the workers' interpreter. ``factory``: ``module:function``, called in each worker as
        ``function(context=context, **arguments)``, gives the started environment; ``arguments`` are plain values.
        ``deadline``: seconds for one score. ``log_path``: takes the rewards' output, up to a bound; empty: none.
        ``lost`` is told of a worker that ended by itself or did not answer in time, and why."""
        if workers < 1 or not deadline > 0:
            raise ValueError(f"a scoring pool needs workers >= 1 and deadline > 0, got {workers} and {deadline}")
        self._python = python
        self._setup = ScoringSetup(factory=factory, arguments=dict(arguments), context=context)
        self._workers = workers
        self._deadline = deadline
        self._log_path = log_path
        self._lost = lost
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._slots: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when every worker has started its environment. Raises the environment's own HeadraceError,
        ContractError for another exception of its, RunError for a worker that ends or stays silent instead."""
        launches = [asyncio.create_task(self._launch()) for _ in range(self._workers)]
        try:
            workers = await asyncio.gather(*launches)
        except BaseException:  # cancelled too: none may stay behind; raised again
            for launch in launches:
                launch.cancel()
            for launched in await asyncio.gather(*launches, return_exceptions=True):
                if isinstance(launched, ScoringProcess):
                    await launched.kill()
            raise
        self._slots = [asyncio.create_task(self._serve(worker)) for worker in workers]

    async def score(self, task: Task, episode: Episode) -> Score:
        """The environment's score. Raises ScoringFailure."""
        (outcome,) = await self.score_many([(task, episode)])
        if isinstance(outcome, ScoringFailure):
            raise outcome
        return outcome

    async def score_many(
        self,
        episodes: Sequence[tuple[Task, Episode]],
        *,
        failed: Callable[[ScoringFailure], None] = lambda failure: None,
    ) -> list[Outcome]:
        """One outcome per episode, in order. An episode that fails does not touch the others; ``failed`` is told of it
        at once, since others may take long."""
        if not self._slots:
            raise ValueError("this scoring pool is not running: start() comes first, close() last")
        items = [self._enqueue(task, episode, failed) for task, episode in episodes]
        try:
            return [await item.outcome for item in items]
        finally:
            for item in items:
                item.outcome.cancel()  # of use only when this caller was cancelled: the rest need not be scored

    async def close(self) -> None:
        """End the workers; an episode without an outcome gets a ``crash``. May be called twice."""
        slots, self._slots = self._slots, []
        for slot in slots:
            slot.cancel()
        if slots:
            await asyncio.wait(slots)
        while not self._queue.empty():
            self._queue.get_nowait().resolve(_closed())

    def _enqueue(self, task: Task, episode: Episode, failed: Callable[[ScoringFailure], None]) -> _Item:
        try:
            item = _Item(pack(ScoringRequest(task=task, episode=episode)), failed)
        except (TypeError, ValueError, OverflowError) as error:
            item = _Item(b"", failed)
            detail = f"task {task.id} cannot travel to a scoring process: {error}"
            item.resolve(ScoringFailure(type(error).__name__, kind="exception", detail=detail))
        else:
            self._queue.put_nowait(item)
        return item

    async def _launch(self) -> ScoringProcess:
        return await ScoringProcess.launch(python=self._python, setup=self._setup, log_path=self._log_path)

    async def _serve(self, worker: ScoringProcess) -> None:
        """One slot: keeps one worker alive and busy until it is cancelled."""
        items: list[_Item] = []
        again: list[_Item] = []
        pace = math.inf
        try:
            while True:
                problem: HeadraceError | None = None
                if worker.lost:
                    worker, problem = await self._replace(worker)
                # At once: behind everything that waits its failure would be told late.
                items = again or await self._take(pace)
                again = []
                if problem is not None:
                    self._fail(items, problem)
                elif worker.lost:  # it ended while idle, through no fault of these
                    self._requeue(items)
                else:
                    pace, again = await self._run(worker, items)
        finally:
            await worker.kill()
            for item in [*items, *again]:
                item.resolve(_closed())

    async def _run(self, worker: ScoringProcess, items: Sequence[_Item]) -> tuple[float, list[_Item]]:
        """Returns the seconds that one episode took, and what to score again."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        ended, answered = await worker.run([(i.request, i.answer) for i in items], deadline=self._deadline)
        pace = max(loop.time() - start, 1e-9) / max(answered, 1)
        again: list[_Item] = []
        if ended != "done":
            # Only now: whoever learns of the failure may rely on the worker being gone.
            code = await self._end(worker, ended)
            failure = self._failure(ended, code)
            item = items[answered]
            if ended == "lost" and was_killed(code) and not item.tried:
                item.tried = True
                again = [item]
            else:
                item.resolve(failure)
            self._requeue(items[answered + 1 :])
        return pace, again

    async def _replace(self, worker: ScoringProcess) -> tuple[ScoringProcess, HeadraceError | None]:
        await self._end(worker)
        try:
            return await self._launch(), None
        except HeadraceError as error:
            return worker, error

    async def _end(self, worker: ScoringProcess, ended: Ended = "lost") -> int | None:
        """Kill a worker, and tell of it once when it was lost by itself or did not answer. Its exit code."""
        code = await worker.kill()
        if worker.untold or ended == "deadline":
            worker.untold = False
            self._lost(self._failure(ended, code).detail)
        return code

    async def _take(self, pace: float) -> list[_Item]:
        """The next episodes whose callers still wait: few enough that no other slot stays idle for them."""
        while True:
            items = [await self._queue.get()]
            waiting = self._queue.qsize()
            count = min(waiting // self._workers, BATCH - 1, int(HANDOUT_SECONDS / pace))
            items += [self._queue.get_nowait() for _ in range(count)]
            items = [item for item in items if not item.outcome.done()]
            if items:
                return items

    def _requeue(self, items: Sequence[_Item]) -> None:
        for item in items:
            self._queue.put_nowait(item)

    def _fail(self, items: Sequence[_Item], problem: HeadraceError) -> None:
        for item in items:
            item.resolve(ScoringFailure(type(problem).__name__, kind="crash", detail=f"no worker: {problem}"))

    def _failure(self, ended: Ended, code: int | None) -> ScoringFailure:
        if ended == "deadline":
            detail = f"no score within {self._deadline:g} s ([environment] scoring_deadline)"
            return ScoringFailure("deadline", kind="deadline", detail=detail)
        return ScoringFailure("crash", kind="crash", detail=f"the scoring process ended: {describe(code)}")


def _outcome(reply: Reply) -> Outcome:
    if isinstance(reply, Raised):
        return ScoringFailure(reply.error, kind="exception", detail=reply.detail)
    if not isinstance(reply, Scored):
        return ScoringFailure("crash", kind="crash", detail="the worker gave no score")
    if math.isnan(reply.score.reward):
        return ScoringFailure("unscored", kind="unscored", detail="the reward is NaN")
    return reply.score


def _closed() -> ScoringFailure:
    return ScoringFailure("closed", kind="crash", detail="the scoring pool was closed")
