"""DORA's evaluation (arXiv 2604.26256) in the simulator: 8,192 samples, lengths up to 30k and 2.4k in the mean, K = 3.

    python tests/benchmarks/simulator_dora.py --work DIR [--json]

The paper gives step times of its policies on 64 and 128 devices, and how much of a step is rollout alone; the rest is
training, on however many devices each has for it. From that:

* A decode step takes 29.8 ms: the synchronous rollout takes 14.9 minutes on 64 devices and as long on 128, so that
  it is the longest response, of 30k tokens, that takes them.
* Training is what the paper's step leaves beside rollout alone; it is given, not predicted.
* Prompts 512 x 16 responses, trained in 16 optimiser steps: one training batch here. Lengths are log-normal with the
  median and sigma that give a mean of 2.4k under the cap.
* 64 devices hold 32 instances and 128 hold 64, of 128 slots each; asynchronous policies roll out on half of them.
* An instance hosts one version at a time, as the paper says. What its multi-version run spends on balancing and moving
  requests, which it gives as shares of a step, an instance spends where it takes up a version.

What is predicted: the step, the share of rollout alone, and so every policy's gain over the synchronous run. One cell
after another; a finished cell is in ``DIR/dora.json`` at once, and another call goes on from there.
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

LENGTHS = LogNormal(median=1330, sigma=1.1, cap=30_000)
STEP_SECONDS = 0.0298
SLOTS = 128
PAPER = {
    "64 synchronous": (22.91, 0.65),
    "64 delayed_update": (22.94, 0.33),
    "64 multi_version": (14.67, 0.12),
    "128 synchronous": (20.23, 0.73),
    "128 multi_version": (10.46, 0.24),
}
"""Minutes of a step, and the share of rollout alone. The one-step-off run on 128 devices has no share in the paper."""
OVERHEAD = {"64 multi_version": 0.00414 + 0.03627, "128 multi_version": 0.01519 + 0.02123}
"""Balancing and moving requests, as shares of a step."""
SETTINGS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "delayed_update": {},
    "multi_version": {"max_staleness": 3},
}


def measure(cell: str) -> dict[str, Any]:
    devices, use = cell.split()
    minutes, alone = PAPER[cell]
    instances = int(devices) // (2 if use == "synchronous" else 4)
    at = bare_scenario(
        lengths=LENGTHS,
        batches=24,
        batch_groups=512,
        group_size=16,
        instances=instances,
        slots=SLOTS,
        live_versions=1,
        costs={
            "step_seconds": STEP_SECONDS,
            "train_seconds": 60 * minutes * (1 - alone),
            "switch_seconds": 60 * minutes * OVERHEAD.get(cell, 0.0),
        },
    )
    found = Simulation(at, Candidate(name=use, policy=policy(use, **SETTINGS[use]))).run()
    return {
        **asdict(found),
        "minutes": found.step_seconds / 60,
        "paper_minutes": minutes,
        "alone": found.rollout_only_share,
        "paper_alone": alone,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cells = Cells(options.work / "dora.json")
    for cell in PAPER:
        cells.fill(cell, lambda cell=cell: measure(cell))
    for cell, found in cells.found.items():
        synchronous = cells.found[f"{cell.split()[0]} synchronous"]
        found["gain"] = synchronous["minutes"] / found["minutes"]
        found["paper_gain"] = synchronous["paper_minutes"] / found["paper_minutes"]
    cells.show("minutes", "paper_minutes", "alone", "paper_alone", "gain", "paper_gain", as_json=options.json)


if __name__ == "__main__":
    main()
