"""What the training loop drives, and the phase it is in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.config import Job, Phase
from headrace.contract import SaveKind
from headrace.dataplane import AsyncPlane
from headrace.run.checkpoint import Checkpoint
from headrace.run.directory import RunDirectory
from headrace.run.evaluation import Evaluator
from headrace.run.journal import Journal
from headrace.run.measures import Measures
from headrace.run.plans import StagePlan
from headrace.run.tasks import TasksIdentity
from headrace.services.controller import Controller
from headrace.services.fleet import Fleet
from headrace.services.groups import GroupPlan
from headrace.services.messages import SaveCall
from headrace.services.stages import Stages
from headrace.services.workers import Workers
from headrace.wire import Client

SAVE_DEADLINE = 300.0


@dataclass(slots=True, kw_only=True)
class Parts:
    """What the loop drives."""

    job: Job
    controller: Controller
    fleet: Fleet
    trainer: Client
    workers: Workers
    stages: Stages
    plane: AsyncPlane
    evaluator: Evaluator
    measures: Measures
    journal: Journal
    directory: RunDirectory
    plan: Callable[[Phase], GroupPlan]
    stage_plan: Callable[[PhaseRun], StagePlan]
    tasks: TasksIdentity

    async def save(self, path: Path, *, kind: SaveKind) -> None:
        """Have the trainer write its weights."""
        await self.trainer.call(
            "save",
            SaveCall(path=str(path), kind=kind),
            deadline=SAVE_DEADLINE,
            awaiting=f"the trainer to write {path}",
        )


@dataclass(frozen=True, slots=True)
class PhaseRun:
    """A phase as it begins here, or goes on."""

    number: int
    phase: Phase
    model_path: str
    """What it starts, or once started, from."""
    resumed: Checkpoint | None

    @property
    def step(self) -> int:
        """The first batch to train."""
        return 0 if self.resumed is None else self.resumed.state.step
