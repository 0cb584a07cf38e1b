"""From a job to a finished run: directory, nodes, phases, audit, report.

Invariant: whatever happens in between, every process is gone, the event log has its last event and every observer is
closed when :func:`run_job` returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import Job, load_resolved
from headrace.errors import HeadraceError
from headrace.observe.audit import audit_run
from headrace.observe.epochs import standing_checkpoints
from headrace.run import checkpoint as checkpoints
from headrace.run.checkpoint import Checkpoint
from headrace.run.cluster import Cluster
from headrace.run.directory import RunDirectory
from headrace.run.evaluation import Evaluator
from headrace.run.journal import Journal
from headrace.run.loop import TrainingLoop
from headrace.run.measures import Measures
from headrace.run.parts import Parts
from headrace.run.plans import evaluation_plan, group_plan, held_out_tasks, stage_plan
from headrace.run.stillness import watch_stillness
from headrace.run.stop_signals import StopSignals
from headrace.run.tasks import require_same

INTERRUPTED = 130
REMIND_SECONDS = 10.0
"""Between two words to who interrupted the run and waits for its batch to end."""

log = logging.getLogger(__name__)


def run_job(job: Job, *, run_dir: Path | None = None) -> int:
    """Run a checked job to its end. Returns the exit status: 0 completed and audited, 1 failed, 130 interrupted.
    Raises HeadraceError for what went wrong, after everything is closed."""
    directory = RunDirectory.create_at(run_dir) if run_dir else RunDirectory.create(Path(job.job.runs), job.job.name)
    directory.write_job(job.resolved())
    return _to_its_end(job, directory, None)


def resume_job(run: Path, check: Callable[[Job], None]) -> int:
    """Continue a run that was stopped or died, from its newest whole checkpoint; returns and raises as
    :func:`run_job` does. ``check`` raises what is wrong with the job now."""
    directory = RunDirectory.open(run)
    checkpoint = checkpoints.newest(directory.checkpoints, in_force=standing_checkpoints(directory.events))
    job = load_resolved(directory.job, directory=checkpoint.state.directory)
    check(job)
    return _to_its_end(job, directory, checkpoint)


@dataclass(frozen=True, slots=True)
class _Run:
    """What one process runs."""

    job: Job
    directory: RunDirectory
    journal: Journal
    resumed: Checkpoint | None


def _to_its_end(job: Job, directory: RunDirectory, resumed: Checkpoint | None) -> int:
    status, reason = "failed", ""
    error: BaseException | None = None
    with StopSignals() as signals:  # or a log could have an end and no beginning
        journal = Journal(directory, job, resumed=None if resumed is None else resumed.state)
        run = _Run(job, directory, journal, resumed)
        try:
            _announce(run)
            status, reason = asyncio.run(_until_stopped(run, signals))
            if status == "stopped":
                command = _continuation(directory)
                journal.notice(f"continue with: {command}" if command else "nothing was saved yet: run the job again")
        except HeadraceError as raised:
            reason, error = raised.message, raised
            if command := _continuation(directory):
                raised.fix = "\n        ".join(filter(None, [raised.fix, f"then continue with: {command}"]))
        except BaseException as raised:  # nobody foresaw it: raised again when everything is closed
            reason, error = f"{type(raised).__name__}: {raised}", raised
        journal.finish(status, reason)
    summary = _summary(run, reason)
    journal.close(status, summary)
    if error is not None:
        raise error
    if status == "stopped":
        return INTERRUPTED
    return 0 if summary.get("audit_ok") else 1


def _continuation(directory: RunDirectory) -> str:
    """The command that continues a run which ended early; "" when it left nothing to continue from."""
    resumable = any(directory.checkpoints.glob("version-*"))
    return f"headrace run --resume {directory.path}" if resumable else ""


async def _until_stopped(run: _Run, signals: StopSignals) -> tuple[str, str]:
    """Run to the end, or to a signal: the first lets the batch in training end and writes a checkpoint, the
    second ends everything at once. Before training begins one is enough. None interrupts the end of the nodes."""
    asked: list[str] = []
    training: list[TrainingLoop] = []
    reminders: list[asyncio.Task[None]] = []
    cluster = Cluster(run.job, run.directory, emit=run.journal.emit, notice=run.journal.notice)
    running = asyncio.ensure_future(_run(run, cluster, training.append))

    def stop(name: str) -> None:
        if name == "SIGHUP" in asked:
            return  # a terminal that closes sends it once and its shell once more: nobody asks for haste by it
        asked.append(name)
        if training and len(asked) == 1 and training[0].unsaved:
            training[0].stop()
            run.journal.notice("stopping after this batch and a checkpoint; interrupt again to stop at once")
            reminders.append(asyncio.create_task(_remind(training[0], run.journal), name="reminders"))
        else:
            running.cancel()

    with signals.telling(stop):
        try:
            completed = await running
        except asyncio.CancelledError:
            if not asked:
                raise
            completed = False
        finally:
            for reminder in reminders:
                reminder.cancel()
            await cluster.close()
    return ("completed", "") if completed else ("stopped", asked[0])


async def _remind(loop: TrainingLoop, journal: Journal) -> None:
    """Say now and then what a run that is asked to stop waits for."""
    while True:
        await asyncio.sleep(REMIND_SECONDS)
        journal.notice(f"waiting for {loop.awaits}; interrupt again to stop at once")


async def _run(run: _Run, cluster: Cluster, trains: Callable[[TrainingLoop], None]) -> bool:
    """Whether the job was completed. ``trains`` is told of the loop when it begins."""
    await cluster.guard(cluster.start())
    return await cluster.guard(_train(run, cluster, trains))


def _announce(run: _Run) -> None:
    """The first event of a start or restart."""
    job, resumed = run.job, run.resumed
    if resumed is None:
        names = [f"rollout-{i}" for i in range(job.rollout.instances)]
        phases = [phase.name for phase in job.phases]
        run.journal.emit("run_started", job=job.job.name, seed=job.job.seed, instances=names, phases=phases)
        return
    state = resumed.state
    run.journal.emit(
        "resumed",
        version=state.version,
        checkpoint=str(resumed.path),
        events=state.events,
        restarted=state.flow.unfinished,
    )


async def _train(run: _Run, cluster: Cluster, trains: Callable[[TrainingLoop], None]) -> bool:
    """The whole job on a started cluster; whether it was completed."""
    job = run.job
    if run.resumed is not None:
        require_same(run.resumed.state.tasks, cluster.tasks)
    parts = Parts(
        job=job,
        controller=cluster.controller,
        fleet=cluster.fleet,
        trainer=cluster.trainer,
        workers=cluster.workers,
        stages=cluster.stages,
        plane=cluster.plane,
        evaluator=Evaluator(
            evaluation_plan(job, held_out_tasks(job, cluster.environment)),
            controller=cluster.controller,
            fleet=cluster.fleet,
            emit=run.journal.emit,
            record=run.journal.evaluation,
        ),
        measures=Measures(run.journal.metrics),
        journal=run.journal,
        directory=run.directory,
        plan=lambda phase: group_plan(job, phase, cluster.environment),
        stage_plan=lambda began: stage_plan(job, began.phase, model_path=began.model_path),
        tasks=cluster.tasks,
    )
    loop = TrainingLoop(parts)
    trains(loop)
    watching = asyncio.create_task(
        watch_stillness(lambda: run.journal.event_count, lambda: loop.awaits, run.journal.notice),
        name="watch stillness",
    )
    try:
        return await loop.run(Path(cluster.model_path), run.resumed)
    finally:
        watching.cancel()


def _summary(run: _Run, reason: str) -> dict[str, Any]:
    """What a person sees at the end."""
    directory, journal = run.directory, run.journal
    summary: dict[str, Any] = {"reason": reason, "run_dir": str(directory.path), **journal.samples()}
    try:
        from headrace.observe.report import write_report  # plots need an extra that a run does not

        audit = audit_run(directory.path)
        summary |= {"audit": audit.verdict, "audit_ok": audit.ok}
        summary["report"] = str(write_report(directory.path))
    except HeadraceError as error:
        summary["report"] = f"none: {error}"
    except Exception as error:  # nothing that goes wrong here may hide how the run itself ended
        log.exception("the run is over, but its audit or report is not complete")
        summary["report"] = f"none: {error}"
    return summary
