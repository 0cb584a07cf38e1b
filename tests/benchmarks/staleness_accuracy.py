"""What staleness costs in accuracy, and which loss bears it: plain clip, truncated importance sampling, decoupled.

    python tests/benchmarks/staleness_accuracy.py --work DIR [--json] [--plot OUT.html] [--cells 8:decoupled:0,...]

A cell is one run of the demo's GRPO phase: K of 0, 2, 8, one of three losses, one of three seeds. The cells of a seed
start from the same warmed-up checkpoint and train equally many batches. *clipped*: PPO's clip of current / behaviour,
without a bound below. *importance*: no clip, weighted by current / behaviour up to 2. *decoupled*: the clip of
current / proximal, weighted by proximal / behaviour up to 2. What counts is the sampled accuracy on held-out prompts
after the last batch: mean and sample standard deviation over the seeds.

Rollout here is hardly ahead of the trainer by itself, so the bound alone would not make rows stale. The runs use
``fixed_staleness.py``: after the first K batches every row is exactly K versions old. The mean staleness that was
measured is reported per cell; it includes the first K batches, which are fresher.

One cell after another. A finished cell is in ``DIR/cells.json`` at once, and another call goes on from there; cells
of another number of batches or prompts are another folder's. Nothing is required of the result.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo import JobTable, progress, records, reinforce_job, run_job, use_two_cores, warmed_up
from kept import Kept

STALENESS = (0, 2, 8)
LOSSES: Mapping[str, Mapping[str, Any]] = {
    "clipped": {"loss": "clipped"},
    "importance": {"loss": "importance"},
    "decoupled": {"loss": "decoupled"},
}
"""Settings of ``grpo``, which has the formulae."""
SEEDS = (0, 1, 2)
POLICY = f"{Path(__file__).with_name('fixed_staleness.py')}:FixedStaleness"


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One run."""

    staleness: int
    loss: str
    seed: int

    def __str__(self) -> str:
        return f"{self.staleness}:{self.loss}:{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to."""

    accuracy: float
    """Held-out, sampled, after the last batch."""
    accuracy_before: float
    """The same of the warmed-up checkpoint."""
    mean_staleness: float
    """Versions, over all trained rows."""
    max_staleness: float
    mean_reward: float
    """Of the last tenth of the batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The seeds of one K and loss together."""

    staleness: int
    loss: str
    seeds: list[int]
    accuracy: float
    spread: float | None
    """Sample standard deviation; None for a single seed."""
    mean_staleness: float


# ---------------------------------------------------------------- cells


def every_cell() -> list[Cell]:
    """Seed after seed, so that an interrupted measurement has whole seeds."""
    return [Cell(k, loss, seed) for seed in SEEDS for k in STALENESS for loss in LOSSES]


def chosen_cells(text: str) -> list[Cell]:
    """``K:loss:seed,...``. ArgumentTypeError when it is not that."""
    return [_cell(item) for item in text.split(",")]


def _cell(text: str) -> Cell:
    k, _, rest = text.partition(":")
    loss, _, seed = rest.partition(":")
    if not (k.isdigit() and seed.isdigit() and loss in LOSSES):
        raise argparse.ArgumentTypeError(f"{text!r} is not K:LOSS:SEED with a loss of {', '.join(LOSSES)}")
    return Cell(int(k), loss, int(seed))


def summarise(outcomes: Mapping[Cell, Outcome]) -> list[Summary]:
    """Mean and spread over the seeds, by K and then loss."""
    groups: dict[tuple[int, str], list[Cell]] = {}
    for cell in sorted(outcomes):
        groups.setdefault((cell.staleness, cell.loss), []).append(cell)
    return [
        Summary(
            staleness=staleness,
            loss=loss,
            seeds=[cell.seed for cell in cells],
            accuracy=statistics.mean(outcomes[cell].accuracy for cell in cells),
            spread=statistics.stdev(outcomes[cell].accuracy for cell in cells) if len(cells) > 1 else None,
            mean_staleness=statistics.mean(outcomes[cell].mean_staleness for cell in cells),
        )
        for (staleness, loss), cells in groups.items()
    ]


# ---------------------------------------------------------------- runs


def cell_job(cell: Cell, model: Path, *, batches: int, prompts: int) -> JobTable:
    """The run of a cell; evaluated before its first batch and after its last."""
    outstanding = float(max(cell.staleness, 1))
    staleness = {"policy": POLICY, "max_staleness": cell.staleness, "outstanding_batches": outstanding}
    job = reinforce_job(model, seed=cell.seed, batches=batches, staleness=staleness)
    job["phase"][0]["algorithm"] = {"use": "grpo", **LOSSES[cell.loss]}
    job["evaluation"] = {"every": batches, "prompts": prompts, "greedy": False}
    return job


def run_cell(cell: Cell, work: Path, *, batches: int, prompts: int) -> Outcome:
    """Train and evaluate."""
    run = work / "runs" / str(cell).replace(":", "-")
    run_job(cell_job(cell, warmed_up(work, cell.seed), batches=batches, prompts=prompts), run)
    return outcome(records(run / "metrics.jsonl"), records(run / "events.jsonl"))


def outcome(batches: Sequence[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> Outcome:
    """From a run's ``metrics.jsonl`` and ``events.jsonl``."""
    evaluated = [event for event in events if event["kind"] == "evaluation_finished"]
    by_version = {event["version"]: event["sampled_accuracy"] for event in evaluated}
    last = batches[-max(1, len(batches) // 10) :]
    return Outcome(
        accuracy=by_version[max(by_version)],
        accuracy_before=by_version[min(by_version)],
        mean_staleness=statistics.mean(batch["staleness/mean"] for batch in batches),
        max_staleness=max(batch["staleness/max"] for batch in batches),
        mean_reward=statistics.mean(batch["reward/mean"] for batch in last),
    )


def measure(cells: Iterable[Cell], work: Path, *, batches: int, prompts: int) -> dict[Cell, Outcome]:
    """Outcomes of ``cells``; runs those that are not kept in ``work`` yet."""
    work.mkdir(parents=True, exist_ok=True)
    kept, wanted = Kept(work / "cells.json", {"batches": batches, "prompts": prompts}, Outcome), list(cells)
    for number, cell in enumerate(wanted):
        if str(cell) not in kept.outcomes:
            kept.add(str(cell), run_cell(cell, work, batches=batches, prompts=prompts))
        found = kept.outcomes[str(cell)]
        progress(
            f"{number + 1}/{len(wanted)} {cell}: accuracy {found.accuracy_before:.3f} -> {found.accuracy:.3f}, "
            f"staleness {found.mean_staleness:.2f}"
        )
    return {cell: kept.outcomes[str(cell)] for cell in wanted}


# ---------------------------------------------------------------- output


def plot(summaries: Sequence[Summary], file: Path) -> None:
    """Accuracy over measured staleness, a line per loss with the spread as bars; one page that needs nothing else."""
    import plotly.graph_objects as go  # type: ignore[import-untyped]

    figure = go.Figure()
    for loss in LOSSES:
        points = [summary for summary in summaries if summary.loss == loss]
        figure.add_scatter(
            name=loss,
            x=[point.mean_staleness for point in points],
            y=[point.accuracy for point in points],
            error_y={"array": [point.spread or 0.0 for point in points]},
            mode="lines+markers",
        )
    figure.update_layout(
        title="Held-out sampled accuracy after equally many batches",
        xaxis_title="mean staleness of trained rows, versions",
        yaxis_title="accuracy, mean and standard deviation over seeds",
        template="plotly_white",
    )
    figure.write_html(file, include_plotlyjs=True)


def show(summaries: Sequence[Summary]) -> None:
    """For people."""
    print("  K  loss        accuracy           staleness  seeds")
    for row in summaries:
        spread = "        " if row.spread is None else f"± {row.spread:.3f}"
        seeds = ", ".join(map(str, row.seeds))
        print(f"{row.staleness:3}  {row.loss:10}  {row.accuracy:.3f} {spread}  {row.mean_staleness:12.2f}  {seeds}")


def main() -> int:
    """Print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="OUT.html", help="also draw it; needs plotly")
    parser.add_argument("--work", type=Path, required=True, help="folder of checkpoints, runs and finished cells")
    parser.add_argument("--cells", type=chosen_cells, default=every_cell(), help="K:LOSS:SEED,...; default: all 27")
    parser.add_argument("--batches", type=int, default=120, help="training batches of a run")
    parser.add_argument("--prompts", type=int, default=512, help="held-out prompts")
    options = parser.parse_args()
    use_two_cores()
    outcomes = measure(options.cells, options.work.resolve(), batches=options.batches, prompts=options.prompts)
    summaries = summarise(outcomes)
    if options.plot is not None:
        plot(summaries, options.plot)
    if options.json:
        cells = {str(cell): asdict(outcome) for cell, outcome in outcomes.items()}
        print(json.dumps({"summaries": [asdict(summary) for summary in summaries], "cells": cells}))
    else:
        show(summaries)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
