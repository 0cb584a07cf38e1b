"""The training loop: what the controller tells everybody to do.

    environment worker ──tickets──▶ controller ◀──batches── trainer
           │  ▲                        │                       │
     prompt│  │tokens            versions to load        weights of v+1
           ▼  │                        ▼                       ▼
        rollout instances ◀──────────────────────── weight publisher
           rows: worker ──▶ storage units ──▶ trainer
                               ▲  ▼
                       reference, advantage

| who                | waits for                                              | who ends the wait            |
|--------------------|--------------------------------------------------------|------------------------------|
| environment worker | a ticket: admission, and an instance with a free place | a batch taken, a publication |
| environment worker | tokens of its trajectories                             | the rollout instance         |
| separate stage     | rows that have the columns it reads                    | workers; stages before it    |
| rollout instance   | requests; a version to load                            | workers; the fleet           |
| this loop          | a batch of whole groups that the policy lets it take   | rows stored by workers, and  |
|                    |                                                        | what stages add to them      |
| this loop          | the trainer's answer                                   | the trainer                  |
| this loop          | leave to publish version + 1                           | the last trajectory of the   |
|                    |                                                        | version that blocks it       |

A node that is lost is started again (:mod:`headrace.run.recovery`), and what waits for it goes on waiting. The trainer
is not: every wait also ends when the run has failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.config import Phase
from headrace.contract import StalenessPolicy
from headrace.errors import LostRowsError
from headrace.flow import BatchLease, Flow
from headrace.graph.declared import group_rows, interruption_of
from headrace.registry import build
from headrace.run.checkpoint import Checkpoint, RunState
from headrace.run.keeper import Keeper
from headrace.run.parts import Parts, PhaseRun
from headrace.run.plans import is_lockstep
from headrace.services.dumps import nothing_was_trained
from headrace.services.groups import GroupPlan
from headrace.services.messages import (
    CancelGroups,
    PhaseSetup,
    PublishCall,
    Published,
    TrainReply,
    VersionCall,
)

TRAIN_DEADLINE = 3600.0
WEIGHTS_DEADLINE = 300.0
MAX_SKIPPED_IN_A_ROW = 3
"""Batches without an optimiser step before the run stops."""


class TrainingLoop:
    """Runs the phases in order. ``version`` only rises, across phases too."""

    def __init__(self, parts: Parts) -> None:
        self._p = parts
        self._keeper = Keeper(parts)
        self.version = 0
        self.awaits = ""
        """What the batch under way waits for, to be told to who waits for its end or sees nothing happen."""
        self._digest = ""
        self._next_group = 0
        self._next_trajectory = 0
        self._skipped_in_a_row = 0
        self._stopping = False
        self._unsaved = False
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def unsaved(self) -> bool:
        """Whether something was trained, or is being trained, that no checkpoint has."""
        return self._unsaved

    def stop(self) -> None:
        """Finish the batch, write a checkpoint, and do not go on."""
        self._stopping = True

    async def run(self, model: Path, resumed: Checkpoint | None = None) -> bool:
        """Every phase, or those that ``resumed`` leaves; whether they ended before :meth:`stop`."""
        phases = self._p.job.phases
        first = resumed.state.phase if resumed is not None else 0
        if resumed is not None:
            model = Path(resumed.state.model_path)
        for number in range(first, len(phases)):
            began = PhaseRun(number, phases[number], str(model), resumed if number == first else None)
            if not await self._run_phase(began, publishes=number == first):
                return False
            last = number + 1 == len(phases)
            model = self._p.directory.models / ("final" if last else phases[number].name)
            await self._p.save(model, kind="export")
        return True

    # ------------------------------------------------------------ weights

    async def publish(self, version: int) -> None:
        """Have the trainer publish its weights as ``version``."""
        p = self._p
        self.awaits = f"the trainer to publish version {version}"
        published = await p.trainer.call(
            "publish",
            PublishCall(version=version, probe=p.fleet.probe),
            reply=Published,
            deadline=WEIGHTS_DEADLINE,
            awaiting=self.awaits,
        )
        p.fleet.published(published)
        manifest = published.manifest
        p.journal.emit("version_published", version=version, digest=manifest.digest, nbytes=manifest.nbytes)
        self.version, self._digest = version, manifest.digest

    async def _publish_first(self, version: int) -> None:
        """The first version of a start or restart reaches every instance, and each must agree with the trainer about
        it before anything else happens."""
        p = self._p
        await self.publish(version)
        await p.fleet.load_everywhere(version)
        while not await p.fleet.self_check(p.trainer, version):
            await p.fleet.load_everywhere(version)  # all were lost; they are being started again

    async def _retire(self, version: int) -> None:
        await self._p.trainer.call(
            "retire_version",
            VersionCall(version=version),
            deadline=WEIGHTS_DEADLINE,
            awaiting=f"the trainer to retire version {version}",
        )
        self._p.journal.emit("version_retired", version=version)

    # ------------------------------------------------------------ phases

    async def _run_phase(self, began: PhaseRun, *, publishes: bool) -> bool:
        """Train ``phase.steps`` batches, or fewer when ``phase.until`` is reached; whether it ended before
        :meth:`stop`. The first phase of a process publishes the weights it begins with; another begins with those
        published last."""
        p, phase = self._p, began.phase
        plan = p.plan(phase)
        await self._begin_on_trainer(began)
        if publishes:
            await self._publish_first(0 if began.resumed is None else began.resumed.state.version)
        flow = self._flow(began, plan)
        p.measures.begin_phase(phase, flow)
        p.fleet.follow(flow if plan.rollout else None)
        if p.job.evaluation.every and began.resumed is None:
            await self._evaluate(flow, plan)
        await self._keeper.put_back(began, flow)
        p.controller.begin_phase(flow, plan)  # at once: a unit that is lost costs groups from now on
        await p.stages.begin(p.stage_plan(began).apart)
        step = began.step
        while not (step and await self._evaluated_enough(flow, phase, plan, step - 1, last=step == phase.steps)):
            if step == phase.steps:
                break
            await self._batch(flow, began, step)
            step += 1
            if self._stopping:
                return False
        await p.stages.end()
        # Groups start during every wait: what ids the phase has given is known in the moment in which it ends.
        self._next_group, self._next_trajectory = flow.end, flow.end * flow.group_size
        await self._cancel(p.controller.end_phase("phase_ended"))
        await self._settle()  # an evaluation may be under way, and the next phase's flow knows nothing of its pin
        return True

    async def _begin_on_trainer(self, began: PhaseRun) -> None:
        p, phase = self._p, began.phase
        await p.trainer.call(
            "begin_phase",
            PhaseSetup(
                engine=phase.trainer,
                algorithm=phase.algorithm,
                model_path=began.model_path,
                total_steps=phase.steps * phase.batch.mini_batches,
                temperature=p.job.rollout.temperature,
                stages=p.stage_plan(began).trainer,
                groups=phase.batch.groups,
                streaming=phase.batch.streaming,
                lockstep=is_lockstep(phase),
                mini_batches=phase.batch.mini_batches,
                micro_batch_tokens=phase.batch.micro_batch_tokens,
            ),
            deadline=WEIGHTS_DEADLINE,
            awaiting=f"the trainer to begin phase {phase.name!r}",
        )
        if began.resumed is not None:
            await self._keeper.restore(began.resumed)
            self._skipped_in_a_row = began.resumed.state.skipped_in_a_row

    async def _cancel(self, groups: list[int]) -> None:
        """Have workers stop what the phase leaves behind: instances must not decode for nobody."""
        await self._p.workers.tell("cancel", CancelGroups(groups=groups), awaiting="to stop its groups")

    def _flow(self, began: PhaseRun, plan: GroupPlan) -> Flow:
        phase = began.phase
        policy = build(phase.staleness)
        assert isinstance(policy, StalenessPolicy)
        batch, columns, rollout = phase.batch, self._p.stage_plan(began).columns, self._p.job.rollout
        sizes: dict[str, Any] = {"batch_groups": batch.groups, "group_size": group_rows(phase)}
        settings: dict[str, Any] = {
            "policy": policy,
            "batches": phase.steps - began.step,
            "rollout": plan.rollout,
            "columns": columns,
            "prompt": plan.task_index if rollout.order == "longest_first" else None,
        }
        if began.resumed is not None:
            return Flow(state=began.resumed.state.flow, **settings, **sizes)
        self._p.journal.emit(
            "phase_started",
            phase=phase.name,
            algorithm=phase.algorithm.use,
            policy=phase.staleness.use,
            max_staleness=policy.max_staleness,
            interrupts=interruption_of(phase) is not None,
            rollout=plan.rollout,
            greedy=plan.greedy,
            version=self.version,
            steps=phase.steps,
            until=(phase.until.metric, phase.until.at_least) if phase.until is not None else None,
            stages=list(columns.writes),
            **sizes,
        )
        if interruption_of(phase) is not None:
            self._p.journal.notice(
                f"phase {phase.name!r}: {phase.staleness.use} interrupts trajectories: what is in the middle of its "
                f"answer goes on under each newer version, so that it is not of a single policy (C1 is given up)"
            )
        # Group and trajectory ids are unique in the run, also when the group size changes.
        first_group = max(self._next_group, -(-self._next_trajectory // sizes["group_size"]))
        return Flow(version=self.version, first_group=first_group, **settings, **sizes)

    # ------------------------------------------------------------ one batch

    async def _batch(self, flow: Flow, began: PhaseRun, step: int) -> None:
        p = self._p
        lease, reply, waited = await self._trained_batch(streaming=began.phase.batch.streaming)
        applied = reply.applied > 0 or not reply.skipped
        p.controller.trained(lease, applied=applied)
        p.journal.emit(
            "batch_trained",
            version=lease.version,
            groups=lease.groups,
            rows=lease.rows,
            rewards=reply.rewards,
            applied=applied,
            optimizer_steps=reply.applied,
            started=reply.started,
            finished=reply.finished,
            wait_seconds=waited,
        )
        self._count_skips(reply)
        if applied:
            waited += await self._publish_next(flow)
        # Nothing is awaited from here until the state is kept: what is dispatched next is not in it.
        reply = msgspec.structs.replace(reply, metrics={**reply.metrics, **p.stages.metrics(lease.groups)})
        p.measures.batch(lease, reply, step=step, wait_seconds=waited, tally=p.controller.tally)
        state = self._state(flow, began, step) if self._checkpoint_due(began.phase, step) else None
        p.controller.pump()
        for version in flow.retirable():
            flow.retired(version)
            await self._retire(version)
        if state is not None:
            self.awaits = "the checkpoint"
            await self._keeper.write(state)
            self._unsaved = False

    async def _trained_batch(self, *, streaming: bool) -> tuple[BatchLease, TrainReply, float]:
        """The next batch, what training it gave, and the seconds waited for it; ``streaming``: of groups as they come.
        What storage lost of it before the trainer had read it is followed by other groups."""
        p = self._p
        waited, read = 0.0, set[int]()
        while True:
            began, self.awaits = time.monotonic(), "whole groups for this batch"
            part = await p.controller.take_batch(in_parts=streaming)
            waited, self._unsaved = waited + time.monotonic() - began, True
            lease = part.lease
            unread = [group for group in lease.groups if group not in read]
            try:
                reply = await self._train(lease.version, unread, last=part.last)
            except LostRowsError:
                p.controller.batch_lost(part, unread)
                continue
            if part.last:
                return lease, reply, waited
            read.update(unread)

    async def _publish_next(self, flow: Flow) -> float:
        """Publish the next version when the policy allows it. Returns the seconds spent waiting for that."""
        p = self._p
        blocked, self.awaits = time.monotonic(), f"the staleness policy's leave to publish version {self.version + 1}"
        await p.controller.publishable()
        blocked = time.monotonic() - blocked
        await self.publish(self.version + 1)
        flow.published(self.version)
        return blocked

    async def _train(self, version: int, groups: Sequence[int], *, last: bool) -> TrainReply:
        """What training a batch gave; of a part that is not the last, what it gave so far."""
        self.awaits = f"the trainer to train the batch of version {version}"
        return await self._p.trainer.call(
            "train",
            self._p.controller.rows.train_call(version, groups, last=last),
            reply=TrainReply,
            deadline=TRAIN_DEADLINE,
            awaiting=self.awaits,
        )

    def _count_skips(self, reply: TrainReply) -> None:
        for path in reply.dumped:
            self._p.journal.notice(f"a step was skipped, its loss or gradient was not finite; its rows are in {path}")
        self._skipped_in_a_row = 0 if reply.applied or not reply.skipped else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise nothing_was_trained(self._skipped_in_a_row, self._p.directory.path / "not_finite")

    # ------------------------------------------------------------ evaluation and saves

    async def _evaluated_enough(self, flow: Flow, phase: Phase, plan: GroupPlan, step: int, *, last: bool) -> bool:
        """Evaluate when it is due; whether ``phase.until`` is reached."""
        every = self._p.job.evaluation.every
        if phase.until is not None and phase.until.every is not None:
            every = phase.until.every
        if not every or ((step + 1) % every and not last):
            return False
        evaluation = self._evaluate(flow, plan)
        if phase.until is None and not last:
            self._spawn(evaluation, f"evaluate version {self.version}")
            return False
        self.awaits = f"the evaluation of version {self.version}"
        await evaluation
        if phase.until is None:
            return False
        value = self._p.evaluator.results[self.version][phase.until.metric]
        return value is not None and value >= phase.until.at_least

    async def _evaluate(self, flow: Flow, plan: GroupPlan) -> None:
        """Evaluate the newest version, which stays live until its last held-out answer."""
        p, version = self._p, self.version
        if version in p.evaluator.results:
            return
        flow.pin(version)
        if plan.rollout:
            await p.fleet.wait_for(version, everywhere=p.evaluator.lockstep)
        else:
            await p.fleet.load_everywhere(version)
        await p.evaluator.begin(version, finished=lambda: flow.unpin(version))

    # ------------------------------------------------------------ checkpoints

    def _checkpoint_due(self, phase: Phase, step: int) -> bool:
        every = self._p.job.checkpoint.every
        return self._stopping or step + 1 == phase.steps or bool(every and (step + 1) % every == 0)

    def _state(self, flow: Flow, began: PhaseRun, step: int) -> RunState:
        return self._keeper.state(
            flow, began, step=step + 1, digest=self._digest, skipped_in_a_row=self._skipped_in_a_row
        )

    # ------------------------------------------------------------ background

    def _spawn(self, work: Awaitable[Any], name: str) -> None:
        """Background work of the loop; its failure fails the run."""
        task = asyncio.ensure_future(work)
        task.set_name(name)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        failed = self._p.controller.failed
        if not task.cancelled() and (error := task.exception()) and not failed.done():
            failed.set_exception(error)

    async def _settle(self) -> None:
        """Wait for background work."""
        while self._background:
            await asyncio.wait(self._background)
