"""The environment worker: plays episodes against instances, has them scored, stores their rows.

One work item is one group (or a set of held-out tasks). The worker asks the controller for items, talks to the
instances and the storage unit directly, and reports what happened in order. Invariant: a group is reported
stored only after the storage unit has acknowledged every one of its rows.
"""

from __future__ import annotations

import asyncio
import functools
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from headrace.contract import (
    Array,
    Batch,
    Column,
    Completion,
    Demonstrations,
    Environment,
    EnvironmentContext,
    Episode,
    GenerationRequest,
    Ragged,
    Sampling,
    Score,
    Task,
)
from headrace.contract.columns import (
    BEHAVIOUR_LOGPROBS,
    GROUP,
    LOSS_MASK,
    REWARD,
    TOKENS,
    TRUNCATED,
    VERSION,
)
from headrace.registry import build
from headrace.services.messages import (
    CancelGroups,
    EvaluationDone,
    EvaluationSample,
    GenerateCall,
    GroupFailed,
    GroupStored,
    Member,
    NodeSpec,
    Report,
    TrajectoryFinished,
    WorkerSetup,
    WorkItem,
    WorkRequest,
)
from headrace.services.node import CONTROLLER_DEADLINE, NodeService
from headrace.services.scoring import ScoringFailure, ScoringPool
from headrace.services.storage import StorageClient
from headrace.wire import Client, rpc

GENERATE_DEADLINE = 600.0
WORK_POLL_SECONDS = 30.0
"""The controller answers "nothing yet" after this long, so that a lost answer costs no more."""

Entry = TrajectoryFinished | GroupStored | GroupFailed | EvaluationDone


class _Session:
    """What one episode may ask of its instance: every call carries the ticket's version and seed."""

    def __init__(self, client: Client, item: WorkItem, member: Member) -> None:
        self._client = client
        self._item = item
        self._member = member
        self._calls = 0
        self.completions: list[Completion] = []

    async def generate(
        self, prompt: Array, *, stop_token_ids: tuple[int, ...] = (), max_new_tokens: int | None = None
    ) -> Completion:
        item, member = self._item, self._member
        budget = item.max_new_tokens if max_new_tokens is None else min(max_new_tokens, item.max_new_tokens)
        request = GenerationRequest(
            request_id=f"{item.kind}-{item.version:08d}-{member.trajectory:012d}-{self._calls:04d}",
            prompt=np.asarray(prompt, dtype=np.int32),
            sampling=Sampling(
                max_new_tokens=budget,
                temperature=item.temperature,
                greedy=item.greedy,
                stop_token_ids=stop_token_ids,
                seed=(member.seed + self._calls) % 2**63,
            ),
            version=item.version,
        )
        self._calls += 1
        call = GenerateCall(request=request, cohort=member.cohort, cohort_size=member.cohort_size)
        completion = await self._client.call(
            "generate",
            call,
            reply=Completion,
            deadline=GENERATE_DEADLINE,
            awaiting=f"trajectory {member.trajectory} from {member.instance}",
        )
        self.completions.append(completion)
        return completion


@dataclass(slots=True)
class _Scores:
    """One score per episode; an episode that could not be scored has reward NaN, and its reason is counted."""

    scores: list[Score] = field(default_factory=list)
    unscored: Counter[str] = field(default_factory=Counter)
    detail: str = ""

    def add(self, outcome: Score | ScoringFailure) -> None:
        if isinstance(outcome, ScoringFailure):
            self.unscored[outcome.reason] += 1
            self.detail = self.detail or outcome.detail
            outcome = Score(reward=float("nan"))
        self.scores.append(outcome)


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
        self._storage = StorageClient(self.network.client(setup.storage))
        self._controller = self.network.client(spec.controller)
        self._instances: dict[str, Client] = {}
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
        )

    async def start(self) -> None:
        await asyncio.to_thread(self._environment.start, self._context)
        await self._scoring.start()
        self.supervise(self._pull(), "pull work")
        self.supervise(self._report(), "report")

    async def close(self) -> None:
        await self._scoring.close()
        await self._storage.close()
        for client in (*self._instances.values(), self._controller):
            await client.close()

    # ------------------------------------------------------------ loops

    async def _pull(self) -> None:
        while True:
            item = await self._controller.call(
                "next_work",
                WorkRequest(worker=self.name),
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

    def _forget(self, group: int, _: asyncio.Task[None]) -> None:
        del self._groups[group]

    async def _report(self) -> None:
        """One report at a time; entries that arrive meanwhile share the next."""
        while True:
            entries = [await self._entries.get()]
            while not self._entries.empty():
                entries.append(self._entries.get_nowait())
            await self._controller.call(
                "report",
                Report(worker=self.name, entries=entries),
                deadline=CONTROLLER_DEADLINE,
                awaiting="the controller to take a report",
            )

    async def _work(self, item: WorkItem) -> None:
        if item.kind == "evaluation":
            await self._evaluate(item)
            return
        try:
            tasks = self._tasks_of(item)
            episodes = await self._episodes(item, tasks)
            await self._store(item, episodes, await self._scores(tasks, episodes))
        except Exception as raised:  # a worker supervises plugins: what one raises fails its group, with traceback
            error = _first(raised)
            self._entries.put_nowait(
                GroupFailed(
                    group=item.group,
                    trajectory=item.members[0].trajectory,
                    reason=type(error).__name__,
                    detail="".join(traceback.format_exception(error)),
                )
            )

    @rpc
    async def cancel(self, request: CancelGroups) -> None:
        """Stop working on these groups, and tell their instances."""
        tasks = [self._groups[group] for group in request.groups if group in self._groups]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ episodes

    def _tasks_of(self, item: WorkItem) -> list[Task]:
        """One task per member; a group's members share theirs."""
        made = {index: self._environment.task(index, split=item.split) for index in {m.task for m in item.members}}
        return [made[m.task] for m in item.members]

    async def _episodes(self, item: WorkItem, tasks: Sequence[Task]) -> list[Episode]:
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(self._episode(item, member, task))
                for member, task in zip(item.members, tasks, strict=True)
            ]
        return [task.result() for task in running]

    async def _episode(self, item: WorkItem, member: Member, task: Task) -> Episode:
        started = time.time()
        if item.kind == "demonstration":
            assert isinstance(self._environment, Demonstrations)
            episode = self._environment.demonstration(task)
        else:
            session = _Session(self._instance(member.instance), item, member)
            episode = await self._environment.run(task, session)
        if item.kind != "evaluation":
            self._entries.put_nowait(_finished(item, member, episode, started))
        return episode

    def _instance(self, address: str) -> Client:
        if address not in self._instances:
            self._instances[address] = self.network.client(address)
        return self._instances[address]

    async def _scores(self, tasks: Sequence[Task], episodes: Sequence[Episode]) -> _Scores:
        scored = _Scores()
        for outcome in await self._scoring.score_many(list(zip(tasks, episodes, strict=True))):
            scored.add(outcome)
        return scored

    async def _store(self, item: WorkItem, episodes: Sequence[Episode], scored: _Scores) -> None:
        versions = [min((s.version for s in e.spans), default=item.version) for e in episodes]
        batch = _rows(item, episodes, scored.scores, versions)
        nbytes = await self._storage.put(batch)
        share = nbytes // len(episodes)
        self._entries.put_nowait(
            GroupStored(
                group=item.group,
                trajectories=[m.trajectory for m in item.members],
                versions=versions,
                tokens=[len(e.tokens) for e in episodes],
                nbytes=[share] * len(episodes),
                rewards=[s.reward for s in scored.scores],
                unscored=dict(scored.unscored),
                detail=scored.detail,
            )
        )

    # ------------------------------------------------------------ evaluation

    async def _evaluate(self, item: WorkItem) -> None:
        tasks = self._tasks_of(item)
        episodes = await self._episodes(item, tasks)
        scored = await self._scores(tasks, episodes)
        self._entries.put_nowait(
            EvaluationDone(
                item=item.group,
                greedy=item.greedy,
                versions=sorted({s.version for e in episodes for s in e.spans}),
                failed=dict(scored.unscored),
                samples=[
                    EvaluationSample(
                        task=m.task,
                        prompt=str(t.data.get("prompt", t.id)),
                        answer=e.text,
                        reward=s.reward,
                        correct=s.reward >= 1 if s.correct is None else s.correct,
                    )
                    for m, t, e, s in zip(item.members, tasks, episodes, scored.scores, strict=True)
                ],
            )
        )


def _first(error: Exception) -> Exception:
    """The first error of a group of them."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _finished(item: WorkItem, member: Member, episode: Episode, started: float) -> TrajectoryFinished:
    sampled = int(episode.loss_mask.sum())
    first = int(np.argmax(episode.loss_mask)) if sampled else len(episode.tokens)
    return TrajectoryFinished(
        group=item.group,
        trajectory=member.trajectory,
        spans=[(s.version, s.start - first, s.stop - first) for s in episode.spans],
        prompt_tokens=len(episode.tokens) - sampled,
        response_tokens=sampled,
        finish_reason=episode.finish_reason,
        started=started,
        finished=time.time(),
    )


def _rows(item: WorkItem, episodes: Sequence[Episode], scores: Sequence[Score], versions: Sequence[int]) -> Batch:
    columns: dict[str, Column] = {
        TOKENS: Ragged.from_arrays([e.tokens for e in episodes], dtype=np.int32),
        LOSS_MASK: Ragged.from_arrays([e.loss_mask for e in episodes], dtype=bool),
        BEHAVIOUR_LOGPROBS: Ragged.from_arrays([e.logprobs for e in episodes], dtype=np.float32),
        REWARD: np.array([s.reward for s in scores], dtype=np.float32),
        GROUP: np.full(len(episodes), item.group, dtype=np.int64),
        VERSION: np.array(versions, dtype=np.int64),
        TRUNCATED: np.array([e.finish_reason == "length" for e in episodes], dtype=bool),
    }
    return Batch(rows=np.array([m.trajectory for m in item.members], dtype=np.int64), columns=columns)
