"""How long the simulator takes for 10,000 instances and 1,000,000 trajectories, on one core.

    python tests/benchmarks/simulator_scale.py [--json] [--trajectories 1000000] [--instances 10000]

``multi_version`` with K = 3 over instances of 2 slots, log-normal lengths (sigma = 1, capped at 8 times the median),
as many trajectories in a batch as there are slots, in groups of 8. CPU seconds of this process; nothing is required of
the result.
"""

from __future__ import annotations

import argparse
import json
import time

from simulated import bare_scenario, policy

from headrace.simulate.lengths import LogNormal
from headrace.simulate.scenario import Candidate
from headrace.simulate.simulation import Simulation

SLOTS, GROUP = 2, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--instances", type=int, default=10_000)
    options = parser.parse_args()
    rows = options.instances * SLOTS
    at = bare_scenario(
        lengths=LogNormal(median=1000, sigma=1, cap=8000),
        batches=max(1, options.trajectories // rows),
        batch_groups=rows // GROUP,
        group_size=GROUP,
        instances=options.instances,
        slots=SLOTS,
        live_versions=4,
        costs={"step_seconds": 0.02, "train_seconds": 25.0, "transfer_seconds": 5.0, "switch_seconds": 0.5},
    )
    began = time.process_time()
    found = Simulation(at, Candidate(name="multi_version K=3", policy=policy("multi_version", max_staleness=3))).run()
    result = {
        "instances": options.instances,
        "trajectories": found.dispatched,
        "cpu_seconds": time.process_time() - began,
        "step_seconds": found.step_seconds,
        "of_bound": found.of_bound,
    }
    print(json.dumps(result) if options.json else result)


if __name__ == "__main__":
    main()
