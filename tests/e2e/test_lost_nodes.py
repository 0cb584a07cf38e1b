"""Processes of a running job are killed or stopped: the run goes on, or ends by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.observe.audit import audit_run
from support.small_job import SmallJob
from support.whole_runs import PHASE_TWO, alive, descendants, events, follow, pid_of

Start = Callable[..., Any]


def lost(run: Any) -> list[str]:
    return [event["node"] for event in events(run, "node_stopped") if event["reason"] != "ended"]


@pytest.mark.parametrize("node", ["rollout-1", "environment-0", "storage-0"])
@pytest.mark.parametrize("max_staleness", [2, 0])
def test_a_node_that_is_killed_is_started_again_and_the_run_completes(
    start: Start, node: str, max_staleness: int
) -> None:
    run = start("phase.rl.steps=12", f"staleness.max_staleness={max_staleness}")
    follow(run, "batch_trained", after=PHASE_TWO)
    os.kill(pid_of(run, node), signal.SIGKILL)
    assert run.wait() == 0, run.stderr
    assert lost(run) == [node]
    assert len([e for e in events(run, "node_started") if e["node"] == node]) == 2
    assert audit_run(run.directory).ok


def test_a_scoring_process_that_is_killed_is_replaced_and_told_of(start: Start) -> None:
    run = start("phase.rl.steps=12")
    follow(run, "batch_trained", after=PHASE_TWO)
    for scorer in descendants(pid_of(run, "environment-0")):
        os.kill(scorer, signal.SIGKILL)
    assert run.wait() == 0, run.stderr
    assert lost(run) == ["environment-0/scoring"]
    assert audit_run(run.directory).ok


def test_a_killed_trainer_ends_the_run_and_is_named(start: Start) -> None:
    run = start("phase.rl.steps=100000")
    follow(run, "batch_trained")
    below = descendants(run.process.pid)
    os.kill(pid_of(run, "trainer"), signal.SIGKILL)
    assert run.wait(seconds=30) == 1
    assert "node trainer" in run.stderr
    assert "Traceback" not in run.stderr
    assert alive(below) == []


def test_a_node_that_is_lost_too_often_ends_the_run_and_is_named(start: Start) -> None:
    run = start("phase.rl.steps=100000", "launcher.max_restarts=0")
    follow(run, "batch_trained")
    os.kill(pid_of(run, "rollout-1"), signal.SIGKILL)
    assert run.wait(seconds=30) == 1
    assert "rollout-1" in run.stderr
    assert "max_restarts" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_node_that_hangs_is_taken_for_lost(start: Start) -> None:
    run = start("phase.rl.steps=100000")
    follow(run, "batch_trained", after=PHASE_TWO)
    os.kill(pid_of(run, "rollout-0"), signal.SIGSTOP)
    stopped = follow(run, "node_stopped")
    assert stopped["node"] == "rollout-0"
    assert stopped["reason"].startswith("sent no heartbeat")
    follow(run, "instance_version", after='"kind":"node_stopped"')
    follow(run, "batch_trained", after='"kind":"node_stopped"')
    run.interrupt()
    assert run.wait() == 130, run.stderr
    assert audit_run(run.directory).ok


def test_of_several_storage_units_one_that_is_killed_costs_its_own_groups_and_the_run_completes(start: Start) -> None:
    run = start("phase.rl.steps=12", "storage.units=2")
    follow(run, "batch_trained", after=PHASE_TWO)
    os.kill(pid_of(run, "storage-1"), signal.SIGKILL)
    assert run.wait() == 0, run.stderr
    assert lost(run) == ["storage-1"]
    assert audit_run(run.directory).ok


DYING = '''"""An engine that is gone while it loads version 5, the first time that anybody does."""

from pathlib import Path

from headrace.errors import EngineError
from headrace_torch.inference import TorchInferenceEngine


class Dying(TorchInferenceEngine):
    gone = False

    async def begin_update(self, manifest):
        if manifest.version == 5:
            try:
                Path(__file__).with_name("died").mkdir()
                self.gone = True
            except FileExistsError:
                pass
        await self.health()
        return await super().begin_update(manifest)

    async def health(self):
        if self.gone:
            raise EngineError("the engine's process is gone")
        return await super().health()
'''


def test_an_engine_that_dies_while_it_loads_a_version_costs_its_instance_alone(job: SmallJob, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    run = job.start("rollout.use='./dying.py:Dying'", "phase.rl.steps=100000")
    stopped = follow(run, "node_stopped")
    assert stopped["reason"] == "ended with status 1"
    node = stopped["node"]
    follow(run, "instance_version", of=f'"instance":"{node}"', after='"kind":"node_stopped"')
    follow(run, "batch_trained", after='"kind":"node_stopped"')
    run.interrupt()
    assert run.wait() == 130, run.stderr
    assert len([e for e in events(run, "node_started") if e["node"] == node]) == 2
    assert audit_run(run.directory).ok
