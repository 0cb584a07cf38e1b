"""The training loop: what the controller tells everybody to do.

    environment worker ──tickets──▶ controller ◀──batches── trainer
           │  ▲                        │                       │
     prompt│  │tokens            versions to load        weights of v+1
           ▼  │                        ▼                       ▼
        rollout instances ◀──────────────────────── weight publisher
           rows: worker ──▶ storage unit ──▶ trainer

| who                | waits for                                              | who ends the wait            |
|--------------------|--------------------------------------------------------|------------------------------|
| environment worker | a ticket: admission, and an instance with a free place | a batch taken, a publication |
| environment worker | tokens of its trajectories                             | the rollout instance         |
| rollout instance   | requests; a version to load                            | workers; the fleet           |
| this loop          | a batch of whole groups that the policy lets it take   | rows stored by workers       |
| this loop          | the trainer's answer                                   | the trainer                  |
| this loop          | leave to publish version + 1                           | the last trajectory of the   |
|                    |                                                        | version that blocks it       |

A node that is lost is started again (:mod:`headrace.run.recovery`), and what waits for it goes on waiting. The trainer
is not: every wait also ends when the run has failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import Job, Phase
from headrace.contract import SaveKind, StalenessPolicy, WeightManifest
from headrace.errors import LostRowsError, RunError
from headrace.flow import BatchLease, Flow
from headrace.registry import build
from headrace.run.directory import RunDirectory
from headrace.run.evaluation import Evaluator
from headrace.run.measures import Measures
from headrace.services.controller import Controller
from headrace.services.fleet import Fleet
from headrace.services.groups import GroupPlan
from headrace.services.messages import CancelGroups, PhaseSetup, SaveCall, TrainCall, TrainReply, VersionCall
from headrace.services.storage import StorageClient
from headrace.services.workers import Workers
from headrace.wire import Client

TRAIN_DEADLINE = 3600.0
WEIGHTS_DEADLINE = 300.0
MAX_SKIPPED_IN_A_ROW = 3
"""Batches without a finite step before the run stops."""


@dataclass(slots=True, kw_only=True)
class Parts:
    """What the loop drives."""

    job: Job
    controller: Controller
    fleet: Fleet
    trainer: Client
    workers: Workers
    storage: StorageClient
    evaluator: Evaluator
    measures: Measures
    emit: Callable[..., Any]
    tolerance: float
    """Of the start-up self-check, in nats."""
    directory: RunDirectory
    plan: Callable[[Phase], GroupPlan]


class TrainingLoop:
    """Runs the phases in order. ``version`` only rises, across phases too."""

    def __init__(self, parts: Parts) -> None:
        self._p = parts
        self.version = 0
        self._next_group = 0
        self._next_trajectory = 0
        self._skipped_in_a_row = 0
        self._background: set[asyncio.Task[Any]] = set()

    # ------------------------------------------------------------ weights

    async def publish(self, version: int) -> WeightManifest:
        """Have the trainer publish its weights as ``version``."""
        p = self._p
        manifest = await p.trainer.call(
            "publish",
            VersionCall(version=version),
            reply=WeightManifest,
            deadline=WEIGHTS_DEADLINE,
            awaiting=f"the trainer to publish version {version}",
        )
        p.fleet.published(version, manifest.digest)
        p.emit("version_published", version=version, digest=manifest.digest, nbytes=manifest.nbytes)
        self.version = version
        return manifest

    async def _publish_initial(self) -> None:
        """Version 0 reaches every instance, and each must agree with the trainer about it before anything starts."""
        p = self._p
        await self.publish(0)
        await p.fleet.load_everywhere(0)
        await p.fleet.self_check(p.trainer, 0, temperature=p.job.rollout.temperature, tolerance=p.tolerance)

    async def _retire(self, version: int) -> None:
        await self._p.trainer.call(
            "retire_version",
            VersionCall(version=version),
            deadline=WEIGHTS_DEADLINE,
            awaiting=f"the trainer to retire version {version}",
        )
        self._p.emit("version_retired", version=version)

    # ------------------------------------------------------------ phases

    async def run_phase(self, phase: Phase, model_path: str, *, first: bool) -> None:
        """Train ``phase.steps`` batches, or fewer when ``phase.until`` is reached. The ``first`` phase publishes the
        weights it starts with; a later one starts with those published last."""
        p = self._p
        plan = p.plan(phase)
        await p.trainer.call(
            "begin_phase",
            PhaseSetup(
                engine=phase.trainer,
                algorithm=phase.algorithm,
                model_path=model_path,
                total_steps=phase.steps * phase.batch.mini_batches,
                temperature=p.job.rollout.temperature,
                mini_batches=phase.batch.mini_batches,
                micro_batch_tokens=phase.batch.micro_batch_tokens,
            ),
            deadline=WEIGHTS_DEADLINE,
            awaiting=f"the trainer to begin phase {phase.name!r}",
        )
        if first:
            await self._publish_initial()
        flow = self._flow(phase, plan)
        p.measures.begin_phase(phase, flow)
        if plan.rollout:
            p.fleet.follow(flow)
        else:
            p.fleet.follow(None)
        if p.job.evaluation.every:
            await self._evaluate(flow, plan)
        p.controller.begin_phase(flow, plan)
        for step in range(phase.steps):
            await self._batch(flow, phase, step)
            last = step + 1 == phase.steps
            if await self._evaluated_enough(flow, phase, plan, step, last=last):
                break
        self._next_group = flow.next_group
        self._next_trajectory = flow.next_group * flow.group_size
        await self._cancel(p.controller.end_phase("phase_ended"))
        await self._free_rows()

    async def _cancel(self, groups: list[int]) -> None:
        """Have workers stop what the phase leaves behind: instances must not decode for nobody."""
        await self._p.workers.tell("cancel", CancelGroups(groups=groups), awaiting="to stop its groups")

    def _flow(self, phase: Phase, plan: GroupPlan) -> Flow:
        policy = build(phase.staleness)
        assert isinstance(policy, StalenessPolicy)
        batch = phase.batch
        # Group and trajectory ids are unique in the run, also when the group size changes.
        first_group = max(self._next_group, -(-self._next_trajectory // batch.group_size))
        self._p.emit(
            "phase_started",
            phase=phase.name,
            algorithm=phase.algorithm.use,
            policy=phase.staleness.use,
            max_staleness=policy.max_staleness,
            batch_groups=batch.groups,
            group_size=batch.group_size,
            rollout=plan.rollout,
            version=self.version,
            steps=phase.steps,
        )
        return Flow(
            policy=policy,
            batch_groups=batch.groups,
            group_size=batch.group_size,
            rollout=plan.rollout,
            version=self.version,
            first_group=first_group,
        )

    # ------------------------------------------------------------ one batch

    async def _batch(self, flow: Flow, phase: Phase, step: int) -> None:
        p = self._p
        waited = time.monotonic()
        lease = await p.controller.take_batch()
        waited = time.monotonic() - waited
        try:
            reply = await self._train(lease)
        except LostRowsError:
            p.controller.batch_lost(lease)
            return await self._batch(flow, phase, step)
        applied = reply.applied > 0 or not reply.skipped
        p.controller.free(flow.trained(lease.lease, applied=applied))
        p.emit(
            "batch_trained",
            version=lease.version,
            groups=lease.groups,
            rows=lease.rows,
            applied=applied,
            optimizer_steps=reply.applied,
            started=reply.started,
            finished=reply.finished,
            wait_seconds=waited,
        )
        self._count_skips(reply)
        self._spawn(self._free_rows(), "free rows")
        if applied:
            waited += await self._advance(flow)
        p.measures.batch(lease, reply, step=step, wait_seconds=waited, tally=p.controller.tally)
        every = p.job.checkpoint.every
        if every and (step + 1) % every == 0:
            await self.checkpoint()

    async def _advance(self, flow: Flow) -> float:
        """Publish the next version when the policy allows it, and retire what it leaves behind. Returns the seconds
        spent waiting for the policy."""
        p = self._p
        blocked = time.monotonic()
        await p.controller.publishable()
        blocked = time.monotonic() - blocked
        await self.publish(self.version + 1)
        flow.published(self.version)
        p.controller.pump()
        for version in flow.retirable():
            flow.retired(version)
            await self._retire(version)
        return blocked

    async def _train(self, lease: BatchLease) -> TrainReply:
        return await self._p.trainer.call(
            "train",
            TrainCall(version=lease.version, rows=list(lease.rows)),
            reply=TrainReply,
            deadline=TRAIN_DEADLINE,
            awaiting=f"the trainer to train the batch of version {lease.version}",
        )

    def _count_skips(self, reply: TrainReply) -> None:
        self._skipped_in_a_row = 0 if reply.applied or not reply.skipped else self._skipped_in_a_row + 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RunError(
                f"no optimiser step of {self._skipped_in_a_row} batches in a row had a finite loss and gradient",
                origin="node trainer",
                fix="lower the learning rate, or look for rewards or log-probs that are not finite",
            )

    async def _free_rows(self) -> None:
        if rows := self._p.controller.rows_to_free():
            await self._p.storage.delete(rows)

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
        await evaluation
        result = self._p.evaluator.results[self.version]
        return phase.until is not None and result[phase.until.metric] >= phase.until.at_least

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

    async def checkpoint(self) -> None:
        """Save what a resume needs, then forget all but the newest of them."""
        p = self._p
        path = p.directory.checkpoint(self.version)
        await self.save(path, kind="resume")
        p.emit("checkpoint_saved", version=self.version, path=str(path))
        p.directory.prune_checkpoints(keep=p.job.checkpoint.keep)

    async def save(self, path: Path, *, kind: SaveKind) -> None:
        """Have the trainer write its weights."""
        await self._p.trainer.call(
            "save",
            SaveCall(path=str(path), kind=kind),
            deadline=WEIGHTS_DEADLINE,
            awaiting=f"the trainer to write {path}",
        )

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

    async def settle(self) -> None:
        """Wait for background work."""
        while self._background:
            await asyncio.wait(self._background)
