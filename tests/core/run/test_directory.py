"""Where a run's files go."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.run.directory import RunDirectory


def test_an_empty_directory_becomes_the_run_s_as_it_is(tmp_path: Path) -> None:
    """It may be a mounted volume, which cannot be removed and made again."""
    volume = tmp_path / "volume"
    volume.mkdir()
    number = volume.stat().st_ino
    other = tmp_path / "takes the number of one that is removed"
    run = RunDirectory.create_at(volume)
    other.mkdir()
    assert run.path.stat().st_ino == number
    assert run.logs.is_dir()
    assert run._lock is not None
    run._lock.close()


def test_a_directory_with_anything_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        RunDirectory.create_at(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
