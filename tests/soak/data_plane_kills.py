"""Kills consumers and storage units of a busy data plane at random moments, and checks what all have written down.

    python tests/soak/data_plane_kills.py --seconds 60 [--seed 0] [--json]

8 producers, 4 consumers of 2 tasks, 2 storage units and a ledger, each a process. Whoever is killed is replaced; a
unit more joins meanwhile. In the end nothing that was acknowledged may be missing, no row acknowledged twice by a task,
every value read must be what was put, every group that went with a unit named, every prompt acknowledged by both tasks,
in its last issue, and the units empty. The exit status is 0 when all of that holds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.kill_run import KillRun


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for which processes are killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the journals, and say where")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="headrace-kills-"))
    outcome = KillRun(work, seed=options.seed).run(options.seconds)
    if options.json:
        print(json.dumps(asdict(outcome)))
    else:
        print("\n".join([*outcome.kills, *outcome.violations[:20]]))
        print(f"{len(outcome.violations)} rules broken in {outcome.seconds:.0f} s; {outcome.figures}")
    if options.keep:
        print(f"journals under {work}", file=sys.stderr)
    else:
        shutil.rmtree(work)
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
