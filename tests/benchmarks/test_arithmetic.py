"""What the benchmarks compute from what they measure; no job is run."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path

import cpu_clock
import end_to_end
import heavy_tail
import pytest
import quantized_arms
import staleness_accuracy
from end_to_end import Measured
from fixed_staleness import FixedStaleness
from kept import Kept
from staleness_accuracy import Cell, Outcome

from headrace.config import load_job
from headrace.config.toml import dumps
from headrace.contract import StalenessPolicy
from headrace.testing.suites import StalenessContract
from headrace.testing.suites.simulation import GROUP_SIZE, Simulation, long_tailed

OUTCOME = Outcome(accuracy=0.8, accuracy_before=0.3, mean_staleness=1.9, max_staleness=2, mean_reward=0.7)


def fixed_staleness(bound: int) -> FixedStaleness:
    return FixedStaleness(FixedStaleness.Settings(max_staleness=bound, outstanding_batches=float(max(bound, 1))))


class TestFixedStaleness(StalenessContract):
    @pytest.fixture(params=[0, 1, 2, 8])
    def plugin(self, request: pytest.FixtureRequest) -> StalenessPolicy:
        return fixed_staleness(request.param)


@pytest.mark.parametrize("bound", [0, 1, 2, 8])
def test_under_fixed_staleness_every_row_is_as_stale_as_the_bound_allows(bound: int) -> None:
    staleness = Simulation(fixed_staleness(bound), lengths=long_tailed, batch_groups=4).run(batches=25).staleness
    rows = 4 * GROUP_SIZE
    assert staleness == [min(batch, bound) for batch in range(25) for _ in range(rows)]


def test_the_overlap_bound_is_the_cores_share_or_the_longest_part() -> None:
    assert end_to_end.overlap_bound({"trainer": 1.0, "rollout-0": 0.5, "rollout-1": 0.7}, 2) == pytest.approx(1.1)
    assert end_to_end.overlap_bound({"trainer": 2.0, "rollout-0": 0.5}, 2) == 2.0


def test_a_curve_is_the_means_of_equal_stretches() -> None:
    assert end_to_end.curve([0, 1, 2, 3], points=2) == [0.5, 2.5]
    assert end_to_end.curve([0.25, 0.5], points=10) == [0.25, 0.5]


def measured(wall: float, trainer: float, **changes: object) -> Measured:
    parts = {"trainer": trainer, "rollout-0": 0.6}
    run = Measured(
        wall_seconds=wall,
        cpu_seconds=sum(parts.values()),
        tokens_per_second=100 / wall,
        rewards=[0.25, 0.5],
        cores_busy=sum(parts.values()) / (2 * wall),
        trainer_idle_share=0.1,
        parts=parts,
        mean_staleness=0.0,
    )
    return dataclasses.replace(run, **changes)  # type: ignore[arg-type]  # changes are Measured's


def test_the_median_of_runs_is_taken_field_by_field() -> None:
    middle = end_to_end.median([measured(1.0, 0.5), measured(3.0, 0.4), measured(2.0, 0.9)])
    assert (middle.wall_seconds, middle.parts) == (2.0, {"trainer": 0.5, "rollout-0": 0.6})
    assert middle.rewards == [0.25, 0.5]
    assert end_to_end.median([measured(1.0, 0.5, parts=None)]).parts is None


def test_ratios_are_of_batches_per_second_and_of_the_bound() -> None:
    kinds = {
        "synchronous": measured(1.5, 0.6),
        "synchronous, 2 threads": measured(1.2, 0.9),
        "multi_version": measured(1.0, 0.8),
        "trl": measured(2.5, 2.2, rewards=[0.5, 0.25]),
    }
    result = end_to_end.compare([kinds], batches=2, trl_skipped=None)
    assert result.overlap_bound == result.of_bound == pytest.approx(0.8)
    assert result.of_bound_of_synchronous_parts == pytest.approx(0.6)
    assert result.trainer_cpu_share_at_bound == pytest.approx(1.0)
    assert (result.speed_to_synchronous, result.speed_to_threaded, result.speed_to_trl) == (1.5, 1.2, 2.5)
    assert (result.cpu_to_trl, result.reward_gap_to_trl) == (pytest.approx(2.0), 0.0)


def test_a_ratio_is_the_median_of_those_within_each_run() -> None:
    def run(synchronous: float, ours: float) -> dict[str, end_to_end.Measured]:
        kinds = {"synchronous": synchronous, "synchronous, 2 threads": synchronous, "multi_version": ours}
        return {kind: measured(seconds, seconds / 2) for kind, seconds in kinds.items()}

    result = end_to_end.compare([run(1.2, 1.0), run(2.6, 2.0), run(7.0, 5.0)], batches=2, trl_skipped="not there")
    assert result.speed_to_synchronous == pytest.approx(1.3)
    assert (result.kinds["synchronous"].wall_seconds, result.speed_to_trl, result.runs) == (2.6, None, 3)


def test_trl_is_skipped_with_a_reason(tmp_path: Path) -> None:
    assert "--trl-python" in str(end_to_end.trl_missing(None))
    assert "cannot be started" in str(end_to_end.trl_missing(tmp_path / "python"))


def test_trls_seconds_are_from_the_first_batchs_end_to_the_lasts() -> None:
    result = {"wall": [9.0, 10.0, 13.0], "cpu": [5.0, 7.0, 11.0], "rewards": [0.2, 0.4, 0.6], "tokens": [9, 20, 20]}
    run = end_to_end.trl_measured(result)
    assert (run.wall_seconds, run.cpu_seconds, run.tokens_per_second) == (2.0, 3.0, 10.0)
    assert (run.rewards, run.cores_busy) == ([0.2, 0.4, 0.6], 0.75)


def test_a_part_is_named_after_the_nearest_node_above_it() -> None:
    parents, nodes = {2: 1, 3: 2, 4: 3, 5: 1}, {2: "environment-0"}
    names = [end_to_end.part_name(pid, parents, nodes) for pid in (1, 2, 4, 5)]
    assert names == ["controller", "environment-0", "environment-0/children", "controller"]


def test_cpu_time_between_two_moments_is_interpolated() -> None:
    readings = [(0.0, {1: 0.0}), (2.0, {1: 1.0, 2: 0.0}), (4.0, {1: 3.0, 2: 4.0}), (6.0, {1: 3.0})]
    assert cpu_clock.interpolated(readings, 1.0, 3.0) == {1: 1.5, 2: 2.0}
    assert cpu_clock.interpolated(readings, 3.0, 6.0) == {1: 1.0, 2: 2.0}


def test_the_cpu_clock_finds_this_process_and_its_parent() -> None:
    [(pid, parent, seconds), *_] = cpu_clock._tree(os.getpid())
    assert (pid, parent) == (os.getpid(), os.getppid())
    assert seconds > 0


def test_the_jobs_of_benchmarks_are_jobs(tmp_path: Path) -> None:
    jobs = list(end_to_end.jobs(tmp_path, seed=1, batches=3).values())
    jobs += [
        staleness_accuracy.cell_job(Cell(2, loss, 0), tmp_path, batches=3, prompts=8)
        for loss in staleness_accuracy.LOSSES
    ]
    jobs += [
        quantized_arms.arm_job(arm, tmp_path, seed=0, batches=3, prompts=8)
        for arm in quantized_arms.every_arm().values()
    ]
    for job in jobs:
        (tmp_path / "job.toml").write_text(dumps(job))
        [phase] = load_job(tmp_path / "job.toml").phases
        assert (phase.name, phase.steps) == ("reinforce", 3)


def test_cells_are_summarised_by_bound_and_loss() -> None:
    outcomes = {
        Cell(8, "clipped", 0): OUTCOME,
        Cell(2, "decoupled", 0): OUTCOME,
        Cell(2, "decoupled", 1): dataclasses.replace(OUTCOME, accuracy=0.9),
    }
    two, eight = staleness_accuracy.summarise(outcomes)
    assert (two.staleness, two.loss, two.seeds, two.accuracy) == (2, "decoupled", [0, 1], pytest.approx(0.85))
    assert two.spread == pytest.approx(0.0707, abs=1e-4)
    assert (eight.staleness, eight.spread) == (8, None)


def test_an_outcome_is_read_from_the_first_and_the_last_evaluation() -> None:
    batches = [{"staleness/mean": s, "staleness/max": s, "reward/mean": r} for s, r in ((0.0, 0.2), (2.0, 0.8))]
    events = [
        {"kind": "evaluation_finished", "version": 2, "sampled_accuracy": 0.75},
        {"kind": "batch_trained", "version": 1},
        {"kind": "evaluation_finished", "version": 0, "sampled_accuracy": 0.25},
    ]
    found = staleness_accuracy.outcome(batches, events)
    assert (found.accuracy_before, found.accuracy) == (0.25, 0.75)
    assert (found.mean_staleness, found.max_staleness, found.mean_reward) == (1.0, 2.0, 0.8)


def test_kept_cells_are_there_in_the_next_call_and_belong_to_their_settings(tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    Kept(file, {"batches": 3}, Outcome).add("8:importance:2", OUTCOME)
    assert Kept(file, {"batches": 3}, Outcome).outcomes == {"8:importance:2": OUTCOME}
    with pytest.raises(SystemExit, match="use another --work"):
        Kept(file, {"batches": 4}, Outcome)


def test_cells_are_chosen_by_bound_loss_and_seed() -> None:
    assert staleness_accuracy.chosen_cells("8:decoupled:0,0:clipped:2") == [
        Cell(8, "decoupled", 0),
        Cell(0, "clipped", 2),
    ]
    with pytest.raises(argparse.ArgumentTypeError, match="8:ppo:0"):
        staleness_accuracy.chosen_cells("8:ppo:0")
    assert len(set(staleness_accuracy.every_cell())) == 27


def tail_run(*accuracies: tuple[float, float], **changes: object) -> heavy_tail.Outcome:
    run = heavy_tail.Outcome(
        accuracies=list(accuracies),
        seconds=100.0,
        trainer_idle_share=0.1,
        mean_staleness=1.0,
        max_staleness=2,
        longest_to_median=20.0,
        mixed=3,
        audit="PASS: all",
    )
    return dataclasses.replace(run, **changes)  # type: ignore[arg-type]  # fields of the run


def test_the_target_of_a_seed_is_the_best_accuracy_that_every_policy_reached() -> None:
    quick, slow = tail_run((0, 0.2), (10, 0.6), (20, 0.9)), tail_run((0, 0.2), (30, 0.4), (60, 0.7), mixed=0)
    found = heavy_tail.summarise({"quick": [quick], "slow": [slow]})
    assert (found["quick"].seconds_to_accuracy, found["slow"].seconds_to_accuracy) == (20, 60)
    assert (found["quick"].best_accuracy, found["quick"].mixed, found["slow"].mixed) == (0.9, 3, 0)
    assert found["slow"].audits == ["PASS: all"]


def test_a_runs_outcome_is_read_from_its_log() -> None:
    def answer(row: int, tokens: int, *versions: int) -> dict[str, object]:
        spans = [(version, start, start + 1) for start, version in enumerate(versions)]
        return {"kind": "trajectory_finished", "trajectory": row, "response_tokens": tokens, "spans": spans}

    events = [
        {"kind": "version_published", "version": 0, "time": 1.0},
        {"kind": "group_dispatched", "time": 2.0},
        answer(0, 3, 0),
        answer(1, 60, 0, 1),
        {"kind": "version_published", "version": 1, "time": 12.0},
        answer(2, 3, 1),
        {"kind": "evaluation_finished", "version": 1, "sampled_accuracy": 0.5},
        {"kind": "evaluation_finished", "version": 0, "sampled_accuracy": 0.25},
        {"kind": "batch_trained", "version": 1, "rows": [0, 1, 2], "wait_seconds": 5.0, "time": 22.0},
    ]
    found = heavy_tail.outcome(events, audit="PASS: all", mixed=1)
    assert found.accuracies == [(0.0, 0.25), (10.0, 0.5)]
    assert (found.seconds, found.trainer_idle_share) == (20.0, 0.25)
    assert (found.mean_staleness, found.max_staleness) == (pytest.approx(2 / 3), 1)
    assert (found.longest_to_median, found.mixed) == (20.0, 1)
