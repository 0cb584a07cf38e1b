"""One scenario under several policies, and what came of it as text and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.config import Job
from headrace.simulate.calibration import Calibration, calibrate
from headrace.simulate.gantt import Recording, write_gantt
from headrace.simulate.lengths import Lengths, parse_lengths
from headrace.simulate.measures import Outcome
from headrace.simulate.scenario import Candidate, Scenario, candidates, rollout_phase, scenario
from headrace.simulate.simulation import Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the command line adds to a job."""

    phase: str | None = None
    instances: int | None = None
    batches: int | None = None
    lengths: str | None = None
    calibrate: Path | None = None
    policies: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a job and the wishes come to."""

    scenario: Scenario
    candidates: Sequence[Candidate]
    calibration: Calibration | None


def prepare(job: Job, wishes: Wishes) -> Prepared:
    """Raises what :func:`scenario`, :func:`candidates` and :func:`calibrate` raise."""
    phase = rollout_phase(job, wishes.phase)
    calibration = None if wishes.calibrate is None else calibrate(wishes.calibrate)
    lengths: Lengths | None = None if calibration is None or job.simulation.lengths else calibration.lengths
    if wishes.lengths is not None:
        lengths = parse_lengths(wishes.lengths, origin="--lengths")
    return Prepared(
        scenario=scenario(
            job,
            phase=phase,
            lengths=lengths,
            costs=job.simulation if calibration is None else calibration.over(job.simulation),
            instances=wishes.instances,
            batches=wishes.batches,
        ),
        candidates=candidates(phase, wishes.policies),
        calibration=calibration,
    )


def simulate(prepared: Prepared, *, gantt: Path | None = None) -> list[Outcome]:
    """Every candidate, in order. ``gantt``: the page to write about them."""
    outcomes: list[Outcome] = []
    recordings: list[tuple[Recording, float]] = []
    for candidate in prepared.candidates:
        recording = Recording(candidate.name)
        spans = None if gantt is None else recording.hear
        outcomes.append(Simulation(prepared.scenario, candidate, spans=spans).run())
        recordings.append((recording, outcomes[-1].step_seconds))
    if gantt is not None:
        write_gantt(gantt, recordings)
    return outcomes


# ---------------------------------------------------------------- results

_HEAD = ("policy", "step s", "tokens/s", "rollout only", "training", "slots idle", "staleness", "of bound")


def as_text(prepared: Prepared, outcomes: Sequence[Outcome]) -> str:
    """A table, a line per policy."""
    at, lines = prepared.scenario, []
    lines.append(
        f"{at.batches} batches of {at.batch_groups} x {at.group_size} trajectories, the first {at.warm_up} not "
        f"measured; {at.instances} instances of {at.slots} slots"
    )
    if prepared.calibration is not None:
        lines.append(
            f"costs are those of a run whose steps took {prepared.calibration.step_seconds:.4g} s, mean of "
            f"{prepared.calibration.batches} batches"
        )
    rows = [_HEAD, *map(_row, outcomes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        shown = [name.ljust(widths[0])]
        shown += [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join(shown))
    return "\n".join(lines)


def _row(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.policy,
        f"{outcome.step_seconds:.4g}",
        f"{outcome.tokens_per_second:,.0f}",
        f"{outcome.rollout_only_share:.1%}",
        f"{outcome.training_share:.1%}",
        f"{outcome.slots_idle_share:.1%}",
        f"{outcome.mean_staleness:.2f} (at most {max(outcome.staleness)})",
        f"{outcome.of_bound:.2f}",
    )


def as_plain(prepared: Prepared, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """For ``--json``."""
    at = prepared.scenario
    calibration = prepared.calibration
    return {
        "batches": at.batches,
        "instances": at.instances,
        "slots": at.slots,
        "seed": at.seed,
        "costs": at.costs.model_dump(),
        "calibrated_step_seconds": None if calibration is None else calibration.step_seconds,
        "policies": [{**asdict(each), "mean_staleness": each.mean_staleness} for each in outcomes],
    }
