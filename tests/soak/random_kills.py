"""Runs a job again and again while its processes are killed or stopped at random, and audits every run.

    python tests/soak/random_kills.py --runs 10 --kills 3 [--seed 0] [JOB] [--set A.B=VALUE ...]

A victim is drawn among rollout instances, environment workers, scoring processes and storage units, at a random moment
of the run; one in eight is stopped (SIGSTOP) instead of killed. A run counts when it completes and its audit passes.
Prints one line per run, and JSON with --json; the exit status is 0 when every run counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from headrace.errors import RunError
from headrace.observe.audit import audit_run
from headrace.observe.events import NodeStarted, NodeStopped, PhaseStarted, read_events

DEMO = Path(__file__).parents[2] / "examples" / "sort_symbols" / "job.toml"
STOPPED_SHARE = 1 / 8


@dataclass
class Outcome:
    """One run."""

    seed: int
    status: int | None = None
    audit: str = ""
    kills: list[str] = field(default_factory=list)
    seconds: float = 0.0
    directory: str = ""

    @property
    def counts(self) -> bool:
        return self.status == 0 and self.audit.startswith("PASS")


def victims(directory: Path) -> dict[str, int]:
    """Process ids by name: nodes that may be lost, and the scoring processes below the workers."""
    living: dict[str, int] = {}
    for event in read_events(directory):
        if isinstance(event, NodeStarted) and event.role != "trainer":
            living[event.node] = event.pid
        elif isinstance(event, NodeStopped):
            living.pop(event.node, None)
    for name, pid in list(living.items()):
        if name.startswith("environment"):
            for number, scorer in enumerate(children(pid)):
                living[f"{name}/scoring-{number}"] = scorer
    return living


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def training(directory: Path) -> bool:
    """Whether the run has got as far as its first phase."""
    try:
        return any(isinstance(event, PhaseStarted) for event in read_events(directory))
    except RunError:
        return False


def hurt(directory: Path, chance: random.Random) -> str:
    """Kill or stop one process; what was done."""
    name, pid = chance.choice(sorted(victims(directory).items()))
    stop = chance.random() < STOPPED_SHARE
    try:
        os.kill(pid, signal.SIGSTOP if stop else signal.SIGKILL)
    except ProcessLookupError:
        return f"{name} (gone already)"
    return f"{name} {'stopped' if stop else 'killed'}"


def one_run(job: str, overrides: list[str], *, kills: int, seed: int, spread: float, work: Path) -> Outcome:
    """``spread``: seconds over which the kills are drawn, from the first phase on."""
    chance = random.Random(seed)
    directory = work / f"run-{seed}"
    outcome = Outcome(seed=seed, directory=str(directory))
    sets = [word for override in overrides for word in ("--set", override)]
    begun = time.monotonic()
    with open(work / f"run-{seed}.log", "w") as log:
        command = [sys.executable, "-m", "headrace", "run", job, "--run-dir", str(directory), *sets]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None and not training(directory):
            time.sleep(0.2)
        start = time.monotonic()
        for due in sorted(chance.uniform(0, spread) for _ in range(kills)):
            while process.poll() is None and time.monotonic() < start + due:
                time.sleep(0.05)
            if process.poll() is None:
                outcome.kills.append(f"{time.monotonic() - start:.1f} s: {hurt(directory, chance)}")
        outcome.status = process.wait()
    outcome.seconds = time.monotonic() - begun
    outcome.audit = audit_run(directory).verdict
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("job", nargs="?", default=str(DEMO))
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--kills", type=int, default=3, help="per run")
    parser.add_argument("--spread", type=float, default=60.0, help="seconds from the first phase in which they happen")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each further one has the next")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=VALUE")
    parser.add_argument("--work", type=Path, help="folder of the runs; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="headrace-kills-"))
    work.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for seed in range(options.seed, options.seed + options.runs):
        outcome = one_run(
            options.job, options.overrides, kills=options.kills, seed=seed, spread=options.spread, work=work
        )
        outcomes.append(outcome)
        print(
            f"seed {seed}: exit {outcome.status}, {outcome.seconds:.0f} s, {outcome.audit}; {'; '.join(outcome.kills)}",
            file=sys.stderr if options.json else sys.stdout,
            flush=True,
        )
    counted = sum(outcome.counts for outcome in outcomes)
    if options.json:
        print(json.dumps({"runs": [asdict(o) for o in outcomes], "counted": counted}))
    else:
        print(f"{counted} of {len(outcomes)} runs completed with a passing audit, under {work}")
    return 0 if counted == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
