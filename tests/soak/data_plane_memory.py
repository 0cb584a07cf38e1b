"""Puts, leases, reads and acknowledges rows for many cycles, and watches the memory of the processes that serve.

    python tests/soak/data_plane_memory.py --cycles 2000 [--json]

The slope of resident memory, of the ledger, of a storage unit and of this process, is fitted after the first quarter;
the exit status is 0 when none of them rises by more than 1 MiB in 50 cycles.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from headrace.contract import Column, Ragged
from headrace.dataplane import DataPlane, Partition

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import kill_roles as roles

EVERY = 50
MOST = 1.0
"""MiB in 50 cycles."""
GROUPS = 64


def resident(pid: int) -> float:
    """MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def cycle(partition: Partition, number: int) -> None:
    count = GROUPS * roles.GROUP
    lengths = np.random.default_rng(number).integers(0, roles.LONGEST, count)
    columns: dict[str, Column] = {
        "prompt": np.arange(count),
        "issue": np.zeros(count, np.int64),
        "tokens": Ragged.from_arrays([np.zeros(length, np.int32) for length in lengths]),
    }
    partition.put(columns, version=number)
    for task in roles.TASKS:
        held = partition.lease(task, GROUPS)
        batch = partition.get(held)
        if task == "score":
            partition.put({"score": roles.scores(batch)}, rows=batch.rows)
        partition.acknowledge(held)


def slopes(seen: list[dict[str, float]]) -> dict[str, float]:
    """MiB in 50 cycles, by process."""
    later = seen[len(seen) // 4 :]
    return {who: float(np.polyfit(range(len(later)), [one[who] for one in later], 1)[0]) for who in later[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cycles", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="headrace-memory-"))
    context = multiprocessing.get_context("forkserver")
    serving = {
        name: context.Process(target=role, args=(work, name), daemon=True)
        for name, role in (("ledger", roles.ledger), ("unit", roles.unit))
    }
    for process in serving.values():
        process.start()
    pids = {name: process.pid or 0 for name, process in serving.items()} | {"client": os.getpid()}
    plane = DataPlane(roles.address_of(work, "ledger"))
    partition, seen = plane.create(roles.SPEC), []
    for number in range(options.cycles):
        cycle(partition, number)
        if number % EVERY == EVERY - 1:
            seen.append({who: resident(pid) for who, pid in pids.items()})
    plane.close()
    for process in serving.values():
        process.kill()
        process.join()
    shutil.rmtree(work)
    found = slopes(seen)
    if options.json:
        print(json.dumps({"slopes": found, "resident": seen}))
    else:
        for who, slope in found.items():
            print(f"{who}: {seen[0][who]:.1f} MiB at first, {seen[-1][who]:.1f} in the end, {slope:+.3f} per 50 cycles")
    return 0 if max(found.values()) <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
