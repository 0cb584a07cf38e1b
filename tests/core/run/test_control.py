"""How a command finds the controller of a run, and what it says when there is none."""

from __future__ import annotations

import fcntl
import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import RunError
from headrace.run.control import ACCESS_FILE, Access, offer, scale, withdraw
from headrace.run.directory import RunDirectory
from headrace.wire import Network, OwnDirectory


@pytest.fixture
def private(tmp_path: Path) -> Iterator[str]:
    own = OwnDirectory(str(tmp_path), "private-")
    yield own.path
    own.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """Of a run that is running, in this process."""
    directory = RunDirectory.create_at(tmp_path / "run")
    directory.write_job({})
    yield directory
    assert directory._lock is not None
    directory._lock.close()


def refusal(path: Path) -> RunError:
    with pytest.raises(RunError) as refused:
        scale(path, 2, tell=print)
    return refused.value


def test_addresses_and_keys_are_where_no_other_user_can_read_them(run: RunDirectory, private: str) -> None:
    network = Network.create(private, host="127.0.0.1")
    offer(run, Access(controller="tcp://127.0.0.1:5", network=network))
    assert json.loads(run.controller.read_bytes()) == {"host": socket.gethostname(), "directory": private}
    access = Path(private) / ACCESS_FILE
    assert stat.S_IMODE(access.stat().st_mode) == 0o600
    assert network.keys is not None
    assert network.keys.client_secret in access.read_text()
    withdraw(run)
    withdraw(run)
    assert not run.controller.exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    assert "is not the directory of a run" in refusal(tmp_path).message


def test_a_run_that_starts_or_ends_is_told_from_one_that_is_over(run: RunDirectory) -> None:
    assert "is starting or ending" in refusal(run.path).message
    assert run._lock is not None
    fcntl.flock(run._lock, fcntl.LOCK_UN)
    error = refusal(run.path)
    assert "is not running" in error.message
    assert "--resume" in error.fix


def test_a_run_that_was_killed_is_over_although_it_left_its_whereabouts(run: RunDirectory, private: str) -> None:
    run.controller.write_text(json.dumps({"host": socket.gethostname(), "directory": f"{private}/swept"}))
    assert run._lock is not None
    fcntl.flock(run._lock, fcntl.LOCK_UN)
    assert "is not running" in refusal(run.path).message


def test_a_run_on_another_host_is_named_with_the_host(run: RunDirectory, private: str) -> None:
    run.controller.write_text(json.dumps({"host": "elsewhere", "directory": private}))
    error = refusal(run.path)
    assert "is on host elsewhere" in error.message
    assert error.fix == "give the command on elsewhere"


def test_a_private_directory_that_is_out_of_reach_is_named(run: RunDirectory, private: str) -> None:
    run.controller.write_text(json.dumps({"host": socket.gethostname(), "directory": f"{private}/gone"}))
    error = refusal(run.path)
    assert "cannot be reached" in error.message
    assert error.origin == f"{private}/gone"
