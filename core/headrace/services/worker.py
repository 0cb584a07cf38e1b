"""The environment worker: plays episodes against instances, has them scored, stores their rows.

One work item is one group (or a set of held-out tasks). The worker asks the controller for items, talks to the
instances and the storage unit directly, and reports what happened in order. Invariant: a group's rows are
put only after the controller has heard of everything that made them.
"""

from __future__ import annotations

import asyncio
import functools
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace import clock
from headrace.contract import Demonstrations, Environment, EnvironmentContext, Episode, Score, Task
from headrace.contract.columns import REWARD, VERSION
from headrace.dataplane import AsyncPlane
from headrace.registry import build
from headrace.services.episodes import checked_episode, finished, rows_of
from headrace.services.failures import excerpt
from headrace.services.messages import (
    CancelGroups,
    Entry,
    EvaluationDone,
    EvaluationSample,
    GroupFailed,
    Member,
    PeerCall,
    Report,
    Scored,
    ScorerLost,
    WorkerSetup,
    WorkItem,
    WorkRequest,
)
from headrace.services.node import CONTROLLER_DEADLINE, NodeService
from headrace.services.node_messages import NodeSpec
from headrace.services.own_time import OwnTime
from headrace.services.scoring import ScoringFailure, ScoringPool
from headrace.services.session import Instances, Session
from headrace.wire import rpc

WORK_POLL_SECONDS = 30.0
"""The controller answers "nothing yet" after this long, so that a lost answer costs no more."""

Then = Callable[[Member, Task, Episode], Awaitable[None]]
"""What is done with an episode as soon as it is played."""


@dataclass(slots=True)
class _Scores:
    """One score per episode; an episode that could not be scored has reward NaN, and its reason is counted."""

    scores: list[Score] = field(default_factory=list)
    unscored: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Score | ScoringFailure) -> None:
        if isinstance(outcome, ScoringFailure):
            self.unscored[outcome.reason] += 1
            outcome = Score(reward=float("nan"))
        self.scores.append(outcome)


@dataclass(slots=True)
class _Answer:
    """One held-out task's, as far as it got."""

    index: int
    task: Task = field(default_factory=lambda: Task(id="", data={}))
    episode: Episode | None = None
    score: Score = field(default_factory=lambda: Score(reward=float("nan")))
    failed: str = ""

    def sample(self) -> EvaluationSample:
        reward, correct = self.score.reward, self.score.correct
        return EvaluationSample(
            task=self.index,
            prompt=str(self.task.data.get("prompt", self.task.id)),
            answer=self.episode.text if self.episode else "",
            reward=reward,
            correct=reward >= 1 if correct is None else correct,
        )


class WorkerService(NodeService):
    """Pulls work, and serves the wish to stop some of it."""

    def __init__(self, spec: NodeSpec) -> None:
        super().__init__(spec)
        setup = msgspec.msgpack.decode(spec.setup, type=WorkerSetup)
        environment = build(setup.environment)
        assert isinstance(environment, Environment)
        self._environment = environment
        self._context = EnvironmentContext(
            model_path=setup.model_path, seed=setup.seed, directory=setup.environment.directory
        )
        self._episode_deadline = setup.episode_deadline
        self._plane = AsyncPlane(setup.ledger, name=spec.id, connect=self.network.client)
        self._controller = self.network.client(spec.controller)
        self._instances = Instances(connect=self.network.client)
        self._entries: asyncio.Queue[Entry] = asyncio.Queue()
        self._groups: dict[int, asyncio.Task[None]] = {}
        self._scoring = ScoringPool(
            python=setup.python,
            factory="headrace.services.scoring:build_environment",
            arguments={"spec": msgspec.to_builtins(setup.environment)},
            context=self._context,
            workers=setup.scoring_workers,
            deadline=setup.scoring_deadline,
            log_path=setup.log_path,
            lost=lambda reason: self._entries.put_nowait(ScorerLost(node=self.name, reason=reason)),
        )

    async def start(self) -> None:
        await asyncio.to_thread(self._environment.start, self._context)
        await self._scoring.start()
        self.supervise(self._pull(), "pull work")
        self.supervise(self._report(), "report")

    async def close(self) -> None:
        await self._scoring.close()
        await self._plane.close()
        await self._instances.close()
        await self._controller.close()

    # ------------------------------------------------------------ loops

    async def _pull(self) -> None:
        while True:
            item = await self._controller.call(
                "next_work",
                WorkRequest(worker=self.spec.id),
                reply=WorkItem | None,  # type: ignore[arg-type]  # a union is a type to msgspec, not to mypy
                deadline=WORK_POLL_SECONDS + CONTROLLER_DEADLINE,
                awaiting="work from the controller",
            )
            if item is None:
                continue
            task = self.supervise(self._work(item), f"{item.kind} {item.group}")
            if item.kind != "evaluation":
                self._groups[item.group] = task
                task.add_done_callback(functools.partial(self._forget, item.group))

    def _forget(self, group: int, task: asyncio.Task[None]) -> None:
        if self._groups.get(group) is task:
            del self._groups[group]

    async def _report(self) -> None:
        """One report at a time; entries that arrive meanwhile share the next."""
        while True:
            entries = [await self._entries.get()]
            while not self._entries.empty():
                entries.append(self._entries.get_nowait())
            await self._controller.call(
                "report",
                Report(worker=self.spec.id, entries=entries),
                deadline=CONTROLLER_DEADLINE,
                awaiting="the controller to take a report",
            )
            for _ in entries:
                self._entries.task_done()

    async def _work(self, item: WorkItem) -> None:
        if item.kind == "evaluation":
            await self._evaluate(item)
            return
        try:
            tasks = self._tasks_of(item)
            if item.by_row:
                await self._row_by_row(item, tasks)
            else:
                episodes = await self._episodes(item, tasks)
                await self._store(item, item.members, episodes, await self._scores(tasks, episodes))
        except Exception as raised:  # a worker supervises plugins: what one raises fails its group, with traceback
            error = _first(raised)
            self._entries.put_nowait(
                GroupFailed(
                    group=item.group,
                    trajectory=item.members[0].trajectory,
                    reason=type(error).__name__,
                    detail=excerpt("".join(traceback.format_exception(error))),
                )
            )

    # ------------------------------------------------------------ what the controller tells

    @rpc
    async def cancel(self, request: CancelGroups) -> None:
        """Stop working on these groups, and tell their instances."""
        tasks = [self._groups[group] for group in request.groups if group in self._groups]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @rpc
    async def instance_lost(self, peer: PeerCall) -> None:
        """Nobody answers at this address any more."""
        await self._instances.lost(peer.address)

    @rpc
    async def unit_lost(self, peer: PeerCall) -> None:
        """The storage unit at this address is gone."""
        await self._plane.lost(peer.address)

    @rpc
    async def unit_joined(self, peer: PeerCall) -> None:
        """There is a storage unit at this address."""
        self._plane.joined()

    # ------------------------------------------------------------ episodes

    def _tasks_of(self, item: WorkItem) -> list[Task]:
        """One task per member; a group's members share theirs."""
        made = {index: self._environment.task(index, split=item.split) for index in {m.task for m in item.members}}
        return [made[m.task] for m in item.members]

    async def _row_by_row(self, item: WorkItem, tasks: Sequence[Task]) -> None:
        """Each row is stored when its answer is scored. When one fails, what is being stored of others still is: they
        will not be played again."""
        puts: list[asyncio.Task[None]] = []

        async def finish(member: Member, task: Task, episode: Episode) -> None:
            scored = await self._scores([task], [episode])
            puts.append(put := asyncio.create_task(self._store(item, [member], [episode], scored)))
            await asyncio.shield(put)

        try:
            await self._episodes(item, tasks, then=finish)
        finally:
            await asyncio.gather(*puts, return_exceptions=True)

    async def _episodes(self, item: WorkItem, tasks: Sequence[Task], *, then: Then | None = None) -> list[Episode]:
        sessions = [self._session(item, member) for member in item.members]

        async def play(member: Member, task: Task, session: Session) -> Episode:
            episode = await self._episode(item, member, task, session)
            if then is not None:
                await then(member, task, episode)
            return episode

        try:
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(play(member, task, session))
                    for member, task, session in zip(item.members, tasks, sessions, strict=True)
                ]
        except BaseException:  # cancelled too: whoever was to be decoded with these must not wait; raised again
            for session in sessions:
                self.supervise(session.withdraw(), f"withdraw {item.kind} {item.group}")
            raise
        return [task.result() for task in running]

    def _session(self, item: WorkItem, member: Member) -> Session:
        own_time = OwnTime(self._episode_deadline)
        return Session(
            self._instances, self._controller, worker=self.spec.id, item=item, member=member, own_time=own_time
        )

    async def _episode(self, item: WorkItem, member: Member, task: Task, session: Session) -> Episode:
        started = clock.now()
        if item.kind == "demonstration":
            assert isinstance(self._environment, Demonstrations)
            episode = checked_episode(self._environment.demonstration(task), "demonstration")
        else:
            episode = await self._run(task, session)
        if item.kind != "evaluation":
            self._entries.put_nowait(finished(item, member, episode, started))
        return episode

    async def _run(self, task: Task, session: Session) -> Episode:
        async with session.own_time.bounded(f"the episode of task {task.id!r}"):
            return checked_episode(await self._environment.run(task, session), "run")

    async def _scores(self, tasks: Sequence[Task], episodes: Sequence[Episode]) -> _Scores:
        """The controller hears of each failure at once, and of the rest together."""
        scored = _Scores()
        for outcome in await self._scoring.score_many(
            list(zip(tasks, episodes, strict=True)), failed=self._report_unscored
        ):
            scored.add(outcome)
        self._entries.put_nowait(Scored(trajectories=len(scored.scores) - scored.unscored.total()))
        return scored

    def _report_unscored(self, failure: ScoringFailure) -> None:
        self._entries.put_nowait(Scored(trajectories=1, unscored={failure.reason: 1}, detail=failure.detail))

    async def _store(
        self, item: WorkItem, members: Sequence[Member], episodes: Sequence[Episode], scored: _Scores
    ) -> None:
        await self._entries.join()
        rows = rows_of(item, members, episodes, scored.scores)
        tags = {VERSION: rows.dense(VERSION), REWARD: rows.dense(REWARD)}
        stored = {name: rows.columns[name] for name in item.columns}
        await self._plane.put(item.partition, stored, rows=rows.rows, tags=tags, fresh=True)

    # ------------------------------------------------------------ evaluation

    async def _evaluate(self, item: WorkItem) -> None:
        """Every held-out task gets an answer, if only that its episode failed."""
        sessions = [self._session(item, member) for member in item.members]
        answers = await asyncio.gather(
            *(self._answer(item, member, session) for member, session in zip(item.members, sessions, strict=True))
        )
        played = [(answer, answer.episode) for answer in answers if answer.episode is not None]
        scored = await self._scores([answer.task for answer, _ in played], [episode for _, episode in played])
        for (answer, _), score in zip(played, scored.scores, strict=True):
            answer.score = score
        failed = scored.unscored + Counter(answer.failed for answer in answers if answer.failed)
        versions = {span.version for _, episode in played for span in episode.spans}
        self._entries.put_nowait(
            EvaluationDone(
                item=item.group,
                greedy=item.greedy,
                versions=sorted(versions),
                failed=dict(failed),
                samples=[answer.sample() for answer in answers],
            )
        )

    async def _answer(self, item: WorkItem, member: Member, session: Session) -> _Answer:
        answer = _Answer(member.task)
        try:
            answer.task = self._environment.task(member.task, split=item.split)
            answer.episode = await self._run(answer.task, session)
        except Exception as error:  # a worker supervises plugins: what one raises fails its answer, with traceback
            answer.failed = type(error).__name__
            detail = excerpt("".join(traceback.format_exception(error)))
            self._entries.put_nowait(Scored(trajectories=1, unscored={answer.failed: 1}, detail=detail))
            await session.withdraw()
        return answer


def _first(error: Exception) -> Exception:
    """The first error of a group of them."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
