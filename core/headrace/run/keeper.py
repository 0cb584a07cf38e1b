"""Keeps a run between two batches, and puts it back.

Invariant: what is kept is one moment: counters, flow and weights are taken before anything more is dispatched or
trained, and every stored row that the flow counts is kept with it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil

import numpy as np

from headrace.contract import Batch
from headrace.errors import HeadraceError, LostRowsError
from headrace.flow import Flow
from headrace.graph.declared import group_rows
from headrace.observe.epochs import standing_checkpoints
from headrace.run import checkpoint as checkpoints
from headrace.run.checkpoint import Checkpoint, RunState
from headrace.run.columns import phase_partition
from headrace.run.parts import Parts, PhaseRun
from headrace.services.messages import RestoreCall

RESTORE_DEADLINE = 300.0
ROWS_AT_ONCE = 1024
"""Rows that are read from storage in one message."""

log = logging.getLogger(__name__)


class Keeper:
    """Writes checkpoints of a run and restores one."""

    def __init__(self, parts: Parts) -> None:
        self._p = parts
        self._in_force: list[str] = []
        """Names of the checkpoints that the event log has announced and no resume made void, oldest first."""

    def state(self, flow: Flow, began: PhaseRun, *, step: int, digest: str, skipped_in_a_row: int) -> RunState:
        """This moment, between two batches. ``step``: the next one; ``digest``: of the published weights."""
        p = self._p
        return RunState(
            directory=p.job.directory,
            events=p.journal.event_count,
            tasks=p.tasks,
            phase=began.number,
            step=step,
            model_path=began.model_path,
            digest=digest,
            flow=flow.state(),
            skipped_in_a_row=skipped_in_a_row,
            quarantine=sorted(p.controller.attempts.quarantine),
            prompts=p.measures.prompts,
            samples=p.measures.samples,
            optimizer_steps=p.measures.optimizer_steps,
            evaluations=dict(p.evaluator.results),
            samples_before=dict(p.journal.before),
            rolled_out=p.journal.rolled_out,
        )

    async def write(self, state: RunState) -> None:
        """A checkpoint of ``state``, while the trainer still has its weights; then remove all but the newest. Rows that
        storage loses at this very moment cost this checkpoint, not the run."""
        p = self._p
        try:
            rows = await self._rows(state)
        except LostRowsError as error:
            log.warning("no checkpoint of version %d: %s", state.version, error.message)
            return
        path = p.directory.checkpoint(state.version, event=state.events)
        hidden = checkpoints.staging(path)
        try:
            await p.save(hidden / checkpoints.TRAINER, kind="resume")
        except HeadraceError:
            shutil.rmtree(hidden, ignore_errors=True)  # a disk that is full needs the room
            raise
        await asyncio.to_thread(checkpoints.complete, hidden, path, state, rows)
        p.journal.emit("checkpoint_saved", version=state.version, path=str(path), events=state.events)
        self._in_force.append(path.name)
        await asyncio.to_thread(checkpoints.settle, path, p.directory.events)
        checkpoints.prune(path.parent, in_force=self._in_force, keep=p.job.checkpoint.keep)

    async def _rows(self, state: RunState) -> list[Batch]:
        size = group_rows(self._p.job.phases[state.phase])
        groups = np.array([stored.group for stored in state.flow.stored], dtype=np.int64)
        rows = (groups[:, None] * size + np.arange(size)).reshape(-1)
        found = self._p.controller.rows.for_checkpoint(rows)  # now: by and by they are trained, and forgotten
        partition, columns, units = found["partition"], found["columns"], found["units"]
        parts = [slice(start, start + ROWS_AT_ONCE) for start in range(0, len(rows), ROWS_AT_ONCE)]
        return [await self._p.plane.get(partition, rows[part], units[part], columns) for part in parts]

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Weights, optimiser and counters are back where they were."""
        p, state = self._p, checkpoint.state
        self._in_force = await asyncio.to_thread(standing_checkpoints, p.directory.events)
        await p.trainer.call(
            "restore",
            RestoreCall(path=str(checkpoint.trainer)),
            deadline=RESTORE_DEADLINE,
            awaiting=f"the trainer to restore {checkpoint.trainer}",
        )
        p.measures.restore(prompts=state.prompts, samples=state.samples, optimizer_steps=state.optimizer_steps)
        p.evaluator.results.update(state.evaluations)
        p.controller.attempts.quarantine.update(state.quarantine)

    async def put_back(self, began: PhaseRun, flow: Flow) -> None:
        """The data plane takes the phase's rows from now on; those that a checkpoint kept are there when this returns,
        in however many storage units there are now, whichever are lost meanwhile."""
        p, phase = self._p, began.phase
        spec = phase_partition(phase.name, p.stage_plan(began).columns, group_size=group_rows(phase))
        rows = p.controller.open_rows(flow, spec)
        lost = -1
        while began.resumed is not None and lost != rows.displaced:
            lost = rows.displaced
            for batch in began.resumed.rows():
                await p.plane.put(phase.name, batch.columns, rows=batch.rows)
