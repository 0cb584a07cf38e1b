"""A job whose algorithm compares with a greedy answer: one more trajectory in each group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.config import check_job, load_job
from headrace.graph.declared import group_rows
from headrace.run.columns import phase_partition
from headrace.run.plans import stage_plan
from headrace.simulate.scenario import rollout_phase, scenario

JOB = Path(__file__).parents[3] / "examples" / "sort_symbols" / "job.toml"
REMAX = 'phase.reinforce.algorithm={use="remax"}'
ALONE = "phase.reinforce.batch={groups=32,group_size=1}"


def errors(*overrides: str) -> list[str]:
    return [str(finding) for finding in check_job(load_job(JOB, overrides)) if finding.severity == "error"]


@pytest.mark.parametrize("dynamic", ["true", "false"])
def test_a_group_may_be_of_one_answer_and_the_greedy_one(dynamic: str) -> None:
    assert errors(REMAX, ALONE, f"batch.dynamic_sampling={dynamic}") == []


def test_where_there_are_greedy_answers_rows_say_so_and_groups_are_larger_by_one() -> None:
    warm_up, reinforce = load_job(JOB, [REMAX]).phases
    assert (group_rows(warm_up), group_rows(reinforce)) == (1, 9)
    job = load_job(JOB, [REMAX])
    for phase, greedy in ((warm_up, False), (reinforce, True)):
        columns = stage_plan(job, phase, model_path="").columns
        assert ("greedy" in phase_partition(phase.name, columns, group_size=group_rows(phase)).columns) == greedy


def test_storage_must_have_room_for_greedy_answers_too() -> None:
    room = f"storage.capacity={32 * 8 * 31}"
    assert errors(room) == []
    (error,) = errors(REMAX, room)
    assert "288 rows" in error


def test_a_simulated_phase_has_greedy_answers_too() -> None:
    job = load_job(JOB, [REMAX, 'simulation={lengths="lognormal:median=9,sigma=1,cap=36",step_seconds=0.1}'])
    assert scenario(job, phase=rollout_phase(job, None), lengths=None, costs=job.simulation).group_size == 9


def test_the_graph_tells_of_them(capsys: pytest.CaptureFixture[Any]) -> None:
    assert main(["graph", str(JOB), "--set", REMAX]) == 0
    assert "32 groups x 8 trajectories and a greedy one, 4 mini-batches" in capsys.readouterr().out
