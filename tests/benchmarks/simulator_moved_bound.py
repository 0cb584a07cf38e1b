"""How far the bound that long trajectories set can be moved, at K = 2 and 3, in the simulator.

    python tests/benchmarks/simulator_moved_bound.py --work DIR [--json]

64 instances of 8 slots whose decode step takes twice as long with all slots taken as with one; a batch of as many
trajectories as slots, log-normal (sigma = 1) and at most 8 times the median, each prompt asked once; training streams
and takes 0.9 of the decoding of a batch, and only the batch waits for the oldest version. Added to that, alone and
together: the order of groups by observed lengths, where the prompt explains all of a length (``known``) or seven tenths
of its variance (``guessed``); and, where an instance hosts a single version, consolidation, by instances that hand keys
and values over. Beside them ``partial_rollout``, whose trajectories change their version, with the same orders: with
the same bound on the staleness of the oldest token, and with one that never binds.

Reported: seconds of a step. One cell after another; a finished cell is in ``DIR/moved_bound.json`` at once, and another
call goes on from there.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simulated import Cells, bare_scenario, policy

from headrace.simulate.lengths import LogNormal
from headrace.simulate.scenario import Candidate
from headrace.simulate.simulation import Simulation

INSTANCES, SLOTS, MEDIAN, BATCHES = 64, 8, 1000, 60
FULL_STEP = 0.02
LENGTHS = LogNormal(median=MEDIAN, sigma=1, cap=8 * MEDIAN)
KNOWN, GUESSED = ({"order": "longest_first", "alike": alike} for alike in (1.0, 0.7))
VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "known": KNOWN,
    "guessed": GUESSED,
    "one version, prefilled again": {"live_versions": 1, "migrates": False},
    "one version, handed over": {"live_versions": 1},
    "one version, handed over+known": {"live_versions": 1, **KNOWN},
    "one version, handed over+guessed": {"live_versions": 1, **GUESSED},
}
PARTIAL: dict[str, dict[str, Any]] = {
    "partial_rollout": {},
    "partial_rollout+known": KNOWN,
    "partial_rollout+guessed": GUESSED,
}
UNBOUNDED = 50
"""A K that never binds."""


def measure(bound: int, settings: dict[str, Any], *, use: str = "multi_version") -> dict[str, Any]:
    rows = INSTANCES * SLOTS
    alone = FULL_STEP / 2
    costs = {
        "step_seconds": alone,
        "step_seconds_per_request": (FULL_STEP - alone) / (SLOTS - 1),
        "prefill_seconds_per_token": alone / 100,
        "train_seconds_per_token": 0.9 * FULL_STEP / rows,
        "prompts": 4 * rows,
        "alike": settings.get("alike", 0.0),
    }
    chosen = {key: value for key, value in settings.items() if key != "alike"}
    at = bare_scenario(
        lengths=LENGTHS,
        batches=BATCHES,
        batch_groups=rows,
        instances=INSTANCES,
        slots=SLOTS,
        streaming=True,
        costs=costs,
        **{"live_versions": bound + 1, **chosen},
    )
    waiting = policy(use, max_staleness=bound, waits="batch")
    found = Simulation(at, Candidate(name=f"{use} K={bound}", policy=waiting)).run()
    return {**asdict(found), "mean_staleness": found.mean_staleness}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cells = Cells(options.work / "moved_bound.json")
    for bound in (2, 3):
        for name, settings in VARIANTS.items():
            cells.fill(f"{bound} {name}", lambda k=bound, chosen=settings: measure(k, chosen))
    for bound in (2, 3, UNBOUNDED):
        for name, settings in PARTIAL.items():
            chosen = {"live_versions": 1, **settings}
            cells.fill(f"{bound} {name}", lambda k=bound, chosen=chosen: measure(k, chosen, use="partial_rollout"))
    cells.show("step_seconds", "bound_seconds", "slots_idle_share", "mean_staleness", "moves", as_json=options.json)


if __name__ == "__main__":
    main()
