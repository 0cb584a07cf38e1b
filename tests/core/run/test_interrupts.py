"""SIGINT, SIGTERM and SIGHUP end a run as they should, and never leave its processes behind."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.run import runner
from headrace.run.stop_signals import StopSignals
from support.desk import turns


class Cluster:
    """Trains until it is interrupted; its end waits for the test."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.started = asyncio.Event()
        self.may_close = asyncio.Event()
        self.closing = self.closed = False

    async def start(self) -> None:
        await self.started.wait()

    async def guard(self, work: Any) -> bool:
        return bool(await work)

    async def close(self) -> None:
        self.closing = True
        await self.may_close.wait()
        self.closed = True


class Loop:
    """Ends its batch when the test says so."""

    def __init__(self) -> None:
        self.stopping = False
        self.unsaved = True
        self.awaits = "the trainer"
        self.batch_ends = asyncio.Event()

    def stop(self) -> None:
        self.stopping = True


class Running:
    """A run up to its signals."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster, self.loop = Cluster(), Loop()
        self.notices: list[str] = []

        async def train(run: Any, cluster: Any, trains: Any) -> bool:
            trains(self.loop)
            await self.loop.batch_ends.wait()
            return not self.loop.stopping

        monkeypatch.setattr(runner, "Cluster", lambda *_, **__: self.cluster)
        monkeypatch.setattr(runner, "_train", train)
        journal = SimpleNamespace(emit=None, notice=self.notices.append)
        run = runner._Run(None, None, journal, None)  # type: ignore[arg-type]  # neither is used
        self.signals = StopSignals()
        self.result = asyncio.ensure_future(self._until_stopped(run))

    async def _until_stopped(self, run: Any) -> tuple[str, str]:
        with self.signals:
            return await runner._until_stopped(run, self.signals)

    async def trains(self) -> None:
        self.cluster.started.set()
        await turns()

    async def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        signal.raise_signal(number)
        await turns()

    async def end(self) -> tuple[str, str]:
        assert self.cluster.closing
        assert not self.result.done()
        self.cluster.may_close.set()
        result = await self.result
        assert self.cluster.closed
        return result


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_the_first_signal_lets_the_batch_end(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    running = Running(monkeypatch)
    await running.trains()
    await running.interrupt(number)
    assert running.loop.stopping
    assert "interrupt again" in running.notices[0]
    assert not running.cluster.closing
    running.loop.batch_ends.set()
    await turns()
    assert await running.end() == ("stopped", number.name)


async def test_until_the_batch_has_ended_it_is_said_again_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "REMIND_SECONDS", 0)
    running = Running(monkeypatch)
    await running.trains()
    assert running.notices == []
    await running.interrupt()
    running.loop.awaits = "the checkpoint"
    await turns()
    running.loop.batch_ends.set()
    await turns()
    said = list(running.notices)
    assert [said[1], said[-1]] == [
        "waiting for the trainer; interrupt again to stop at once",
        "waiting for the checkpoint; interrupt again to stop at once",
    ]
    await running.end()
    assert running.notices == said, "nothing is said of a batch that has ended"


async def test_the_second_signal_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running(monkeypatch)
    await running.trains()
    await running.interrupt()
    await running.interrupt()
    assert await running.end() == ("stopped", "SIGINT")


async def test_a_terminal_that_closes_and_its_shell_that_says_so_again_let_the_batch_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = Running(monkeypatch)
    await running.trains()
    await running.interrupt(signal.SIGHUP)
    await running.interrupt(signal.SIGHUP)
    assert not running.cluster.closing
    running.loop.batch_ends.set()
    await turns()
    assert await running.end() == ("stopped", "SIGHUP")


async def test_before_training_begins_one_signal_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running(monkeypatch)
    await turns()
    await running.interrupt()
    assert await running.end() == ("stopped", "SIGINT")


async def test_while_nothing_is_trained_that_a_checkpoint_lacks_one_signal_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = Running(monkeypatch)
    running.loop.unsaved = False
    await running.trains()
    await running.interrupt()
    assert await running.end() == ("stopped", "SIGINT")


async def test_no_signal_interrupts_the_end_of_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running(monkeypatch)
    await running.trains()
    for _ in range(5):
        await running.interrupt()
    assert await running.end() == ("stopped", "SIGINT")


async def test_a_run_that_was_completed_before_the_signals_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running(monkeypatch)
    await running.trains()
    running.loop.batch_ends.set()
    await turns()
    await running.interrupt()
    await running.interrupt()
    assert await running.end() == ("completed", "")


def test_a_signal_that_nobody_is_told_of_yet_interrupts_nothing_and_is_told_then() -> None:
    told: list[str] = []

    async def run(signals: StopSignals) -> None:
        with signals.telling(told.append):
            assert told == ["SIGINT"]
            signal.raise_signal(signal.SIGTERM)
            await turns()
        signal.raise_signal(signal.SIGINT)

    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        asyncio.run(run(signals))
        signal.raise_signal(signal.SIGINT)
    assert told == ["SIGINT", "SIGTERM"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_terminal_that_closes_is_nothing_to_a_run_that_was_started_with_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("saved", [True, False])
def test_an_interrupted_run_says_what_to_do_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, saved: bool) -> None:
    async def stopped(run: Any, signals: StopSignals) -> tuple[str, str]:
        return "stopped", "SIGINT"

    monkeypatch.setattr(runner, "_until_stopped", stopped)
    monkeypatch.setattr(runner, "_summary", lambda run, reason: {})
    monkeypatch.setattr(runner, "_announce", lambda run: None)
    if saved:
        (tmp_path / "version-00000003").mkdir()
    notices: list[str] = []
    journal = SimpleNamespace(notice=notices.append, finish=lambda *_: None, close=lambda *_: None)
    directory = SimpleNamespace(path=tmp_path, checkpoints=tmp_path)
    monkeypatch.setattr(runner, "Journal", lambda *_, **__: journal)
    assert runner._to_its_end(None, directory, None) == runner.INTERRUPTED  # type: ignore[arg-type]  # no job is used
    expected = (
        f"continue with: headrace run --resume {tmp_path}" if saved else "nothing was saved yet: run the job again"
    )
    assert notices == [expected]
