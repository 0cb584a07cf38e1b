"""What the simulator's studies share: scenarios without a job file, and cells that are kept as they are finished."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from headrace.config import SimulationConfig
from headrace.contract import StalenessPolicy
from headrace.registry import PluginSpec, build
from headrace.simulate.lengths import Lengths, Trajectories
from headrace.simulate.scenario import Scenario

TAKEN = "cpu_seconds"
"""What a cell took to simulate."""


def bare_scenario(
    *,
    lengths: Lengths,
    batches: int,
    batch_groups: int,
    instances: int,
    slots: int,
    live_versions: int,
    costs: dict[str, Any],
    group_size: int = 1,
    migrates: bool = True,
    streaming: bool = False,
    order: Literal["stream", "longest_first"] = "stream",
) -> Scenario:
    """No evaluation, no retries but three, everything else as said."""
    settings = SimulationConfig(**costs)
    return Scenario(
        batches=batches,
        batch_groups=batch_groups,
        group_size=group_size,
        streaming=streaming,
        order=order,
        instances=instances,
        slots=slots,
        live_versions=live_versions,
        migrates=migrates,
        max_attempts=3,
        evaluation_every=0,
        evaluation_answers=0,
        costs=settings,
        trajectories=Trajectories(
            lengths, seed=0, most=10**9, group_size=group_size, prompts=settings.prompts, alike=settings.alike
        ),
        seed=0,
    )


def policy(use: str, **settings: Any) -> StalenessPolicy:
    """A staleness policy by its name."""
    built = build(PluginSpec(role="staleness", use=use, settings=settings))
    assert isinstance(built, StalenessPolicy)
    return built


class Cells:
    """Results by name, in a file that has each as soon as it is there."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def fill(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure a cell that is not there yet."""
        if name in self.found:
            return
        began = time.process_time()
        cell = measure()
        self.found[name] = {**cell, TAKEN: time.process_time() - began}
        hidden = self._path.with_suffix(".partial")
        hidden.write_text(json.dumps(self.found, indent=1))
        hidden.replace(self._path)

    def show(self, *columns: str, as_json: bool) -> None:
        """All cells, or these columns of them."""
        if as_json:
            print(json.dumps(self.found, indent=1))
            return
        for name, cell in self.found.items():
            print(name.ljust(34), *(f"{column} {cell[column]:.4g}" for column in (*columns, TAKEN)), sep="  ")
