from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.data_plane import Services
from support.plane_world import World


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    tmp_path.chmod(0o700)
    running = Services(tmp_path)
    yield running
    running.close()


@pytest.fixture
def world() -> Iterator[World]:
    """On a clock of its own, without sockets."""
    running = World()
    yield running
    running.close()
