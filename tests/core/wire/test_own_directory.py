"""A process's own directory, where a run's sockets are, and what becomes of those of killed processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.wire import OwnDirectory


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def own_directory() -> OwnDirectory:
    return OwnDirectory(tempfile.gettempdir(), "headrace-")


def test_it_is_private_and_gone_after_the_run(temporary: Path) -> None:
    directory = own_directory()
    assert Path(directory.path).stat().st_mode & 0o777 == 0o700
    directory.close()
    directory.close()
    assert list(temporary.iterdir()) == []


def test_that_of_a_killed_run_is_removed_by_the_next_and_that_of_a_living_one_is_not(temporary: Path) -> None:
    script = (
        f"import tempfile; tempfile.tempdir = {str(temporary)!r}\n"
        "from headrace.wire import OwnDirectory\n"
        "directory = OwnDirectory(tempfile.gettempdir(), 'headrace-'); print(directory.path, flush=True); input()"
    )
    paths = []
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        paths.append(Path(other.stdout.readline().strip()))
        own_directory().close()
        assert paths[0].exists(), "its run lives"
        other.send_signal(signal.SIGKILL)
    assert paths[0].exists()
    own_directory().close()
    assert not paths[0].exists()


def test_a_directory_without_a_lock_is_nobody_s_to_remove(temporary: Path) -> None:
    (temporary / "headrace-notes").mkdir()
    own_directory().close()
    assert (temporary / "headrace-notes").exists()
