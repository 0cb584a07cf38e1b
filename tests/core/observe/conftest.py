"""Runs on a virtual clock. Every test of this folder reads or forges what they leave behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.interrupted_run import interrupted_run
from support.mishaps import Mishaps
from support.simulated_run import Simulation


@pytest.fixture(scope="session")
def simulation() -> Simulation:
    """A run of 15 batches; not to be changed."""
    return Simulation()


@pytest.fixture(scope="session")
def simulate() -> type[Simulation]:
    """For runs of another shape."""
    return Simulation


@pytest.fixture
def run_dir(simulation: Simulation, tmp_path: Path) -> Path:
    """The run's directory."""
    return simulation.write(tmp_path / "run")


@pytest.fixture(scope="session")
def mishaps() -> Mishaps:
    """A run that lost nodes and was resumed; not to be changed."""
    return Mishaps()


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Events of a run whose trajectories are interrupted."""
    return interrupted_run(tmp_path_factory.mktemp("interrupted"))
