"""A folder with files to be wrong about."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.refusals import write_files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the job is; also the working directory."""
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
