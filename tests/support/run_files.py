"""The files that a run leaves behind, from records in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.observe.lines import RecordLog

Event = dict[str, Any]
WARM_UP = "warm-up"
REINFORCE = "reinforce"
START = 1_760_000_000.0


class RunFiles:
    """Records, in the order of their lines."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.metrics: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.job: dict[str, Any] = {}
        self._epoch = 0
        self._now = START

    def _emit(self, kind: str, **fields: Any) -> None:
        common = {"seq": len(self.events), "time": round(self._now, 6), "epoch": self._epoch, "kind": kind}
        self.events.append({**common, **fields})

    def write(self, directory: Path) -> Path:
        """The files of a finished run."""
        directory.mkdir(parents=True, exist_ok=True)
        files = {"events": self.events, "metrics": self.metrics, "evaluation": self.evaluations}
        for name, records in files.items():
            with RecordLog(directory / f"{name}.jsonl") as log:
                for record in records:
                    log.write(record)
        (directory / "job.json").write_text(json.dumps(self.job, indent=2))
        return directory


def learning(skill: float, staleness: int, noise: Callable[[], float]) -> dict[str, float]:
    """What a batch of generated rows measures; ``noise`` is 0 to 1."""
    return {
        "reward/mean": min(1.0, skill + 0.06 * (noise() - 0.5)),
        "reward/std": math.sqrt(skill * (1 - skill)),
        "groups/all_right_share": skill**2,
        "groups/all_wrong_share": (1 - skill) ** 2,
        "policy/entropy": 0.9 - 0.6 * skill + 0.03 * noise(),
        "policy/clip_share_high": 0.02 * noise(),
        "mismatch/abs_logprob_diff_mean": 0.002 + 0.006 * staleness + 0.001 * noise(),
        "mismatch/abs_logprob_diff_max": 0.05 + 0.2 * noise(),
    }


def samples(skill: float) -> list[dict[str, Any]]:
    """Held-out answers."""
    made = []
    for index, word in enumerate(("dbca", "hgea", "fedb", "cabh", "bdac", "gfeh", "ehab", "acgd")):
        answer = "".join(sorted(word)) if index / 8 < skill else word
        made.append({"prompt": f"sort {word} =", "answer": answer, "reward": float(answer != word)})
    return made
