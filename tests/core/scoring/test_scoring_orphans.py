"""No process outlives its scoring worker, and no worker its pool."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.contract import Episode, Task
from headrace.services.scoring import ScoringFailure, ScoringPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted and killed on Linux only")

Pool = Callable[..., ScoringPool]
Ends = Callable[[int], bool]

SPAWN = """
import subprocess
note = lambda pid: (here / 'pids').open('a').write(f'{pid} ')
note(os.getpid()), note(os.getppid())
child = subprocess.Popen(['sleep', '1000']); note(child.pid)
away = subprocess.Popen(['sleep', '1000'], start_new_session=True); note(away.pid)
ready, done = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        note(os.getpid())
        os.write(done, b'x')
        while True: pass
    os._exit(0)
os.read(ready, 1)
(here / 'gate').open('w').close()
"""
"""A child, a child in a session of its own, and a daemon, each of which would run for ever."""


@pytest.fixture
def spawned(tmp_path: Path) -> Callable[[], list[int]]:
    """Wait until :data:`SPAWN` has run; the pids of scorer, guard and the three that the scorer started."""
    os.mkfifo(tmp_path / "gate")

    def wait() -> list[int]:
        (tmp_path / "gate").read_bytes()
        return [int(pid) for pid in (tmp_path / "pids").read_text().split()]

    return wait


@pytest.mark.parametrize("end", ["while True: pass", "os._exit(1)"])
async def test_a_lost_worker_takes_all_it_started_with_it(
    pool: Pool, spawned: Callable[[], list[int]], episode: Episode, ends: Ends, end: str
) -> None:
    scoring = pool(deadline=3.0)
    await scoring.start()
    waiting = asyncio.create_task(asyncio.to_thread(spawned))
    with pytest.raises(ScoringFailure):
        await scoring.score(Task(id="t", data={"code": SPAWN + end}), episode)
    pids = await waiting
    assert len(pids) == 5
    assert all(ends(pid) for pid in pids)


async def test_a_worker_whose_guard_is_killed_takes_all_it_started_with_it(
    pool: Pool, spawned: Callable[[], list[int]], episode: Episode, ends: Ends
) -> None:
    lost: list[str] = []
    scoring = pool(lost=lost.append)
    await scoring.start()
    score = asyncio.create_task(scoring.score(Task(id="t", data={"code": SPAWN}), episode))
    pids = await asyncio.to_thread(spawned)
    assert (await score).reward == 1.0
    os.kill(pids[1], signal.SIGKILL)
    assert ends(pids[0])
    assert (await scoring.score(Task(id="t", data={"code": "pass"}), episode)).reward == 1.0
    assert len(pids) == 5
    assert all(ends(pid) for pid in pids)
    assert lost == ["the scoring process ended: killed by SIGKILL"], "one that ended while idle is told of too"


async def test_closing_a_pool_ends_what_earlier_scores_left_running(
    pool: Pool, spawned: Callable[[], list[int]], episode: Episode, ends: Ends
) -> None:
    scoring = pool()
    await scoring.start()
    score = asyncio.create_task(scoring.score(Task(id="t", data={"code": SPAWN}), episode))
    pids = await asyncio.to_thread(spawned)
    assert (await score).reward == 1.0
    await scoring.close()
    assert all(ends(pid) for pid in pids)


POOL_PROCESS = """
import asyncio, signal, sys
import numpy as np
from headrace.contract import EnvironmentContext, Episode, Task
from headrace.services.scoring import ScoringPool

async def main(folder, code):
    context = EnvironmentContext(model_path="", seed=0, directory=folder)
    pool = ScoringPool(python=sys.executable, factory="scripted:make", arguments={}, context=context, workers=1,
                       deadline=600.0)
    await pool.start()
    episode = Episode(tokens=np.array([1]), loss_mask=np.array([True]), logprobs=np.array([0.0]), spans=(),
                      finish_reason="stop")
    await pool.score(Task(id="t", data={"code": code}), episode)

signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in a shell's background ignore it
asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("code", [signal.SIGKILL, signal.SIGINT])
def test_a_pools_death_by_any_signal_ends_its_workers_and_all_they_started(
    spawned: Callable[[], list[int]], tmp_path: Path, ends: Ends, scripted: dict[str, str], code: signal.Signals
) -> None:
    command = [sys.executable, "-c", POOL_PROCESS, str(tmp_path), SPAWN + "while True: pass"]
    with subprocess.Popen(command, env=scripted, stderr=subprocess.DEVNULL) as process:
        pids = spawned()
        process.send_signal(code)
        assert process.wait(60) != 0
    assert len(pids) == 5
    assert all(ends(pid) for pid in pids)


def test_a_pools_death_ends_a_worker_that_is_stopped_and_all_it_started(
    spawned: Callable[[], list[int]], tmp_path: Path, ends: Ends, scripted: dict[str, str]
) -> None:
    command = [sys.executable, "-c", POOL_PROCESS, str(tmp_path), SPAWN + "while True: pass"]
    with subprocess.Popen(command, env=scripted, stderr=subprocess.DEVNULL) as process:
        pids = spawned()
        guard = pids[1]
        os.kill(guard, signal.SIGSTOP)
        process.kill()
        process.wait(60)
    assert len(pids) == 5
    assert all(ends(pid) for pid in pids)
