"""The files that a run leaves behind, from records in memory."""

from __future__ import annotations

import json
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
