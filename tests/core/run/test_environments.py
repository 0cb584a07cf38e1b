"""An environment that does not start, as whoever wrote it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import PluginError
from headrace.registry import PluginSpec
from headrace.run.environments import started

BROKEN = """
from headrace.testing import FakeEnvironment

class Broken(FakeEnvironment):
    def start(self, context):
        raise RuntimeError("no server here")
"""


def test_an_environment_that_raises_when_it_starts_is_told_with_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BROKEN)
    spec = PluginSpec(role="environment", use="./mine.py:Broken", settings={"vocabulary": 8}, directory=str(tmp_path))
    with pytest.raises(PluginError, match="did not start: RuntimeError: no server here") as told:
        started(spec, model_path="", seed=0)
    assert told.value.origin == f"{tmp_path / 'mine.py'}:6 in start"
    assert told.value.fix
