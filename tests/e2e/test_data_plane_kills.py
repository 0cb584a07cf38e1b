"""Processes of a data plane are killed while it is busy; ``tests/soak/data_plane_kills.py`` does it for longer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from support.kill_checks import Books, violations

SOAK = Path(__file__).parents[1] / "soak" / "data_plane_kills.py"


def test_nothing_is_lost_unnamed_or_done_twice_while_consumers_and_units_are_killed() -> None:
    """In a process of its own, from which clean ones can be forked."""
    command = [sys.executable, str(SOAK), "--seconds", "5", "--seed", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    outcome = json.loads(done.stdout)
    assert outcome["violations"] == []
    assert any("unit" in kill for kill in outcome["kills"])
    assert any("train" in kill or "score" in kill for kill in outcome["kills"])
    assert outcome["figures"]["groups_lost"] + outcome["figures"]["puts_without_answer"] > 0


def test_a_lost_group_that_nobody_knows_is_one_that_a_put_may_have_left_behind() -> None:
    lost = Counter([7, 8])
    assert violations(Books(lost=lost, moves=1)) == [
        "2 lost groups were never put; 0 puts had no answer, and puts moved 1 times"
    ]
    assert violations(Books(lost=lost, moves=2)) == []
