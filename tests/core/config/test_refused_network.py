"""Where metrics cannot be served is found before anything starts."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.config import check_job, load_job
from support.refusals import refused, teaches

pytest.importorskip("prometheus_client", reason="the extra metrics is not installed")

WriteJob = Callable[..., Path]


def test_a_port_that_is_taken_is_refused(folder: Path, write_job: WriteJob, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        override = f"network.metrics=127.0.0.1:{taken.getsockname()[1]}"
        text = refused(write_job(), capsys, "--set", override)
    teaches(text, f"--set {override}", "Address already in use", "choose a port or path that is free")


@pytest.mark.parametrize(
    ("path", "reason"), [("mine.py", "there is something else"), ("mine.py/socket", "mine.py is not a folder")]
)
def test_a_path_where_no_socket_can_be_is_refused(
    folder: Path, write_job: WriteJob, capsys: pytest.CaptureFixture[str], path: str, reason: str
) -> None:
    override = f"network.metrics=unix:{path}"
    text = refused(write_job(), capsys, "--set", override)
    teaches(text, f"--set {override}", reason, "choose a port or path that is free")


def test_a_socket_at_which_somebody_listens_is_refused(
    folder: Path, write_job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind("metrics.sock")
        taken.listen()
        text = refused(write_job(), capsys, "--set", "network.metrics=unix:metrics.sock")
    teaches(text, "--set network.metrics=unix:metrics.sock", "it is in use by another process", "path that is free")
    assert check_job(load_job(write_job(), ["network.metrics=unix:metrics.sock"])) == [], "it was left behind"


def test_a_place_that_was_only_tried_is_free(folder: Path, write_job: WriteJob) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for listen in (f"127.0.0.1:{port}", f"localhost:{port}", "127.0.0.1:0", "unix:metrics"):
        job = load_job(write_job(), [f"network.metrics={listen}"])
        assert check_job(job) == []
        assert check_job(job) == []
    assert not (folder / "metrics").exists()
