"""How close ``multi_version`` comes to what its bound on staleness allows, in the simulator.

    python tests/benchmarks/simulator_ideal.py --work DIR [--json] [--cells 64:8:2,...] [--waits publication]

A cell is a fleet (64, 1,024 or 10,000 instances), a cap on log-normal lengths (sigma = 1; 8 or 20 times the median) and
a K (1 to 8). Training takes 0.9 of the time in which all slots decode a batch; a batch has as many trajectories as
there are slots, each a group of its own. The bound is the larger of that decoding, of training, and of the longest
trajectory / K. What is reported is bound / step, which the policy should bring to 0.95 or more.

By default only the batch waits for the oldest version, and training streams; with ``--waits publication`` publication
waits, and a batch is trained when it is whole.

The longest trajectory is the mean, over versions, of the longest one of each (:mod:`headrace.simulate.measures`).

One cell after another. A finished cell is in ``DIR/ideal.json`` at once, and another call goes on from there.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simulated import Cells, bare_scenario, policy

from headrace.simulate.lengths import LogNormal, Trajectories
from headrace.simulate.scenario import Candidate
from headrace.simulate.simulation import Simulation

MEDIAN = 1000
FLEETS = {64: 8, 1024: 8, 10_000: 8}
"""Instances → slots of each."""
CAPS = (8, 20)
BOUNDS = range(1, 9)
BATCHES = {64: 60, 1024: 40, 10_000: 24}
STEP_SECONDS = 0.02


def measure(instances: int, cap: int, bound: int, waits: str) -> dict[str, Any]:
    slots = FLEETS[instances]
    lengths = LogNormal(median=MEDIAN, sigma=1, cap=cap * MEDIAN)
    drawn = Trajectories(lengths, seed=0, most=cap * MEDIAN)
    mean = sum(drawn.tokens(trajectory) for trajectory in range(20_000)) / 20_000
    at = bare_scenario(
        lengths=lengths,
        batches=BATCHES[instances],
        batch_groups=instances * slots,
        instances=instances,
        slots=slots,
        live_versions=bound + 1,
        streaming=waits == "batch",
        costs={"step_seconds": STEP_SECONDS, **training(mean, instances * slots, streams=waits == "batch")},
    )
    settings = {"max_staleness": bound, "waits": waits}
    candidate = Candidate(name=f"multi_version K={bound}", policy=policy("multi_version", **settings))
    return asdict(Simulation(at, candidate).run())


def training(mean: float, rows: int, *, streams: bool) -> dict[str, float]:
    """What 0.9 of the decoding of a batch costs, by the token where training streams."""
    seconds = 0.9 * mean * STEP_SECONDS
    return {"train_seconds_per_token": seconds / (mean * rows)} if streams else {"train_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cells", default="", metavar="INSTANCES:CAP:K,...")
    parser.add_argument("--waits", default="batch", choices=("batch", "publication"))
    options = parser.parse_args()
    wanted = [(n, cap, k) for n in FLEETS for cap in CAPS for k in BOUNDS]
    if options.cells:
        wanted = [tuple(map(int, cell.split(":"))) for cell in options.cells.split(",")]
    cells = Cells(options.work / "ideal.json")
    for instances, cap, bound in wanted:
        name = f"{instances}:{cap}:{bound}:{options.waits}"
        cells.fill(name, lambda n=instances, c=cap, k=bound: measure(n, c, k, options.waits))
    cells.show("of_bound", as_json=options.json)


if __name__ == "__main__":
    main()
