"""AsyncFlow's ladder on the demo job: what streaming gains, and what the delayed update gains on top of it.

    python tests/benchmarks/ladder.py [--json] [--runs 3] [--batches 40] [--instances 1]

Three kinds from the same warmed-up checkpoint, on the same two cores, the same batches (32 prompts x 8 answers), one
optimiser step each, evaluation and checkpoints off. One rollout instance and the trainer, so that each has a core as it
has a device elsewhere: a rung gains what the one below leaves idle, and the demo's two instances leave nothing.
*synchronous*: a version's batch is generated, then trained. *streaming*: the same policy, but the trainer computes on
groups as they come. *delayed_update*: streaming, and the next batch is generated under the version before while this
one is trained. Kinds alternate; seconds are per batch, from the first trained batch to the last; medians over the runs
count, and ratios are of runs of the same round. Nothing is required of the result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from demo import progress, records, reinforce_job, run_job, use_two_cores, warmed_up

SYNCHRONOUS = {"policy": "synchronous"}
LADDER: dict[str, tuple[dict[str, Any], bool]] = {
    "synchronous": (SYNCHRONOUS, False),
    "streaming": (SYNCHRONOUS, True),
    "delayed_update": ({"policy": "delayed_update", "max_staleness": 1}, True),
}
"""Kind → its staleness table, and whether its batches stream."""


def measured(run: Path) -> float:
    """Wall seconds per batch."""
    ends = [event["finished"] for event in records(run / "events.jsonl") if event["kind"] == "batch_trained"]
    return float((ends[-1] - ends[0]) / (len(ends) - 1))


def climb(work: Path, *, runs: int, batches: int, instances: int) -> dict[str, list[float]]:
    """Seconds per batch of each kind, run by run."""
    model = warmed_up(work, 0)
    seconds: dict[str, list[float]] = {kind: [] for kind in LADDER}
    for number in range(runs):
        for kind, (staleness, streaming) in LADDER.items():
            job = reinforce_job(model, seed=0, batches=batches, staleness=staleness)
            job["rollout"]["instances"] = instances
            job["phase"][0]["batch"] |= {"mini_batches": 1, "streaming": streaming}
            run_job(job, work / f"{kind}-{number}")
            seconds[kind].append(measured(work / f"{kind}-{number}"))
            progress(f"run {number + 1}/{runs} {kind}: {seconds[kind][-1]:.3f} s per batch")
    return seconds


def main() -> int:
    """Print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=3, help="of each kind")
    parser.add_argument("--batches", type=int, default=40, help="per run")
    parser.add_argument("--instances", type=int, default=1, help="of rollout")
    options = parser.parse_args()
    use_two_cores()
    with tempfile.TemporaryDirectory() as work:
        seconds = climb(Path(work), runs=options.runs, batches=options.batches, instances=options.instances)
    base = seconds["synchronous"]
    result = {
        "seconds_per_batch": {kind: statistics.median(values) for kind, values in seconds.items()},
        "speed_to_synchronous": {
            kind: statistics.median(first / other for first, other in zip(base, values, strict=True))
            for kind, values in seconds.items()
        },
        "runs": options.runs,
        "batches": options.batches,
        "instances": options.instances,
    }
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
