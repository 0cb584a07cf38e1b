from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.data_plane import Services


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    tmp_path.chmod(0o700)
    running = Services(tmp_path)
    yield running
    running.close()
