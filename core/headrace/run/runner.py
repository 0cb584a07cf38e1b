"""From a job to a finished run: directory, nodes, phases, audit, report.

Invariant: whatever happens in between, every process is gone, the event log has its last event and every observer is
closed when :func:`run_job` returns.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from headrace.config import Job
from headrace.errors import HeadraceError
from headrace.observe.audit import audit_run
from headrace.run.cluster import Cluster
from headrace.run.directory import RunDirectory
from headrace.run.evaluation import Evaluator
from headrace.run.journal import Journal
from headrace.run.loop import Parts, TrainingLoop
from headrace.run.measures import Measures
from headrace.run.plans import evaluation_plan, group_plan, held_out_tasks, self_check_tolerance

INTERRUPTED = 130

log = logging.getLogger(__name__)


def run_job(job: Job, *, run_dir: Path | None = None) -> int:
    """Run a checked job to its end. Returns the exit status: 0 completed and audited, 1 failed, 130 interrupted.
    Raises HeadraceError for what went wrong, after everything is closed."""
    directory = RunDirectory.create_at(run_dir) if run_dir else RunDirectory.create(Path(job.job.runs), job.job.name)
    directory.write_job(job.resolved())
    journal = Journal(directory, job)
    status, reason, error = "failed", "", None
    try:
        status, reason = asyncio.run(_until_signal(lambda: _run(job, directory, journal)))
    except HeadraceError as raised:
        reason, error = raised.message, raised
    finally:
        journal.finish(status, reason)
        summary = _summary(directory, journal, reason)
        journal.close(status, summary)
    if error is not None:
        raise error
    if status == "stopped":
        return INTERRUPTED
    return 0 if summary.get("audit_ok") else 1


async def _until_signal(work: Callable[[], Coroutine[Any, Any, None]]) -> tuple[str, str]:
    """Run to the end or to the first SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(work())
    stopped: list[str] = []

    def stop(name: str) -> None:
        stopped.append(name)
        running.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number.name)
    try:
        await running
    except asyncio.CancelledError:
        if not stopped:
            raise
        return "stopped", stopped[0]
    return "completed", ""


async def _run(job: Job, directory: RunDirectory, journal: Journal) -> None:
    cluster = Cluster(job, directory, emit=journal.emit)
    try:
        await cluster.start()
        await cluster.guard(_train(job, directory, journal, cluster))
    finally:
        await cluster.close()


async def _train(job: Job, directory: RunDirectory, journal: Journal, cluster: Cluster) -> None:
    """The whole job on a started cluster."""
    parts = Parts(
        job=job,
        controller=cluster.controller,
        fleet=cluster.fleet,
        trainer=cluster.trainer,
        workers=cluster.workers,
        storage=cluster.storage,
        evaluator=Evaluator(
            evaluation_plan(job, held_out_tasks(job, cluster.environment)),
            controller=cluster.controller,
            fleet=cluster.fleet,
            emit=journal.emit,
            record=journal.evaluation,
        ),
        measures=Measures(journal.metrics),
        emit=journal.emit,
        tolerance=self_check_tolerance(job),
        directory=directory,
        plan=lambda phase: group_plan(job, phase, cluster.environment),
    )
    loop = TrainingLoop(parts)
    model = Path(cluster.model_path)
    for number, phase in enumerate(job.phases):
        await loop.run_phase(phase, str(model), first=number == 0)
        last = number + 1 == len(job.phases)
        model = directory.models / ("final" if last else phase.name)
        await loop.save(model, kind="export")
    await loop.checkpoint()
    await loop.settle()


def _summary(directory: RunDirectory, journal: Journal, reason: str) -> dict[str, Any]:
    """What a person sees at the end."""
    summary: dict[str, Any] = {"reason": reason, "run_dir": str(directory.path), **journal.samples()}
    try:
        from headrace.observe.report import write_report  # plots need an extra that a run does not

        audit = audit_run(directory.path)
        summary |= {"audit": audit.verdict, "audit_ok": audit.ok}
        summary["report"] = str(write_report(directory.path))
    except Exception as error:  # nothing that goes wrong here may hide how the run itself ended
        log.exception("the run is over, but its audit or report is not complete")
        summary["report"] = f"none: {error}"
    return summary
