"""The console: a panel on a terminal, lines elsewhere, and the same closing words on both."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.observe.epochs import VoidEvents
from headrace.observe.events import Resumed
from headrace.observe.observers import ObserverManager
from headrace_observers.console import Console
from headrace_observers.progress import Progress

JOB = {"job": {"name": "sort-symbols"}, "phase": [{"name": "warm-up"}, {"name": "reinforce"}]}
SUMMARY = {
    "samples_before": [{"prompt": "sort [ba] =", "answer": "[bold]ba", "reward": 0.0}],
    "samples_after": [{"prompt": "sort [ba] =", "answer": "ab", "reward": 1.0}],
    "audit": "PASS: 19 rules over 1,238 events, 240 trajectories trained, none lost, and a good deal more than that",
    "report": "runs/sort-symbols-1/report.html",
}


def play(simulation: Any, manager: ObserverManager, *, at_batch: Callable[[int], None] = lambda _: None) -> None:
    """The whole run, as the controller would tell it."""
    metrics = iter(simulation.metrics)
    manager.run_opened("runs/sort-symbols-1", JOB)
    batch = 0
    for event in simulation.events:
        manager.event(event)
        if event["kind"] == "batch_trained":
            manager.metrics(next(metrics))
            at_batch(batch := batch + 1)
    manager.run_closed("completed", SUMMARY)


def managed(**settings: float) -> ObserverManager:
    manager = ObserverManager()
    manager.register(Console(Console.Settings(**settings)), name="console")
    return manager


# ---------------------------------------------------------------- without a terminal


def test_without_a_terminal_there_are_plain_lines_and_no_control_characters(
    capsys: pytest.CaptureFixture[str], simulation: Any
) -> None:
    manager = managed(interval_seconds=0.0)
    play(simulation, manager)
    text = capsys.readouterr().out
    assert not manager.disabled
    assert "\x1b" not in text
    assert "phase reinforce (2 of 2): grpo, up to 12 batches of 4 x 4, max_staleness 2" in text
    assert len(re.findall(r"\] reinforce \d+/12  reward [\d.]+  staleness [\d.]+/2  tokens/s", text)) == 12
    assert len(re.findall(r"\] warm-up \d+/3  loss [\d.]+", text)) == 3
    assert re.search(r"version \d+: held-out \d+% sampled, \d+% greedy", text)


def test_the_start_says_what_is_being_started_and_when_all_of_it_serves(
    capsys: pytest.CaptureFixture[str], simulation: Any
) -> None:
    play(simulation, managed())
    lines = [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()]
    model = lines.index("model made from [model.scratch]")
    started = [e["node"] for e in simulation.events if e["kind"] == "node_started"]
    assert lines[model + 1 : model + 1 + len(started)] == [f"starting {node}" for node in started]
    served = [i for i, line in enumerate(lines) if re.fullmatch(r"every node serves after [\d.]+ s", line)]
    assert len(served) == 1
    assert lines[served[0] + 1].startswith("phase warm-up")


def test_an_evaluation_of_which_nothing_could_be_scored_says_so_and_why(
    capsys: pytest.CaptureFixture[str], simulation: Any
) -> None:
    evaluated = next(e for e in simulation.events if e["kind"] == "evaluation_finished")
    manager = managed()
    manager.run_opened("runs/a", JOB)
    nothing = {"greedy_accuracy": None, "sampled_accuracy": None, "failed": {"deadline": 3, "KeyError": 61}}
    manager.event({**evaluated, **nothing})
    assert not manager.disabled
    version = evaluated["version"]
    assert f"] version {version}: held-out none could be scored: 61 KeyError, 3 deadline\n" in capsys.readouterr().out


def test_an_existing_model_is_named_at_the_start(capsys: pytest.CaptureFixture[str], simulation: Any) -> None:
    manager = managed()
    manager.run_opened("runs/a", {**JOB, "model": {"path": "/models/small"}})
    manager.event(simulation.events[0])
    assert "] model /models/small\n" in capsys.readouterr().out


def test_without_a_terminal_lines_are_rationed_but_a_phases_last_batch_is_always_told(
    capsys: pytest.CaptureFixture[str], simulation: Any
) -> None:
    play(simulation, managed(interval_seconds=3600.0))
    steps = re.findall(r"\] (warm-up|reinforce) (\d+)/", capsys.readouterr().out)
    assert steps == [("warm-up", "1"), ("warm-up", "3"), ("reinforce", "12")]


def test_the_end_shows_answers_before_and_after_the_verdict_and_the_report(
    capsys: pytest.CaptureFixture[str], simulation: Any
) -> None:
    play(simulation, managed())
    _, _, end = capsys.readouterr().out.partition("held-out task")
    assert re.search(r"sort \[ba\] = +✗ \[bold\]ba +✓ ab", end)
    lines = end.splitlines()
    assert f"audit         {SUMMARY['audit']}" in lines, "a line that a script looks for may not be wrapped"
    assert "report        runs/sort-symbols-1/report.html" in lines


def test_an_answer_of_many_lines_is_shown_as_one_and_cut(capsys: pytest.CaptureFixture[str]) -> None:
    manager = managed()
    manager.run_opened("runs/a", JOB)
    sample = {"prompt": "1 + 1 =", "answer": "let us\nthink " + "step " * 40, "reward": None}
    manager.run_closed("completed", {"samples_before": [sample], "samples_after": [sample]})
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "1 + 1" in line]
    assert "✗ let us think step" in line
    assert "…" in line


def test_a_failed_run_says_why_and_why_there_is_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    manager = managed()
    manager.run_opened("runs/a", JOB)
    manager.run_closed("failed", {"reason": "node trainer exited", "report_error": "no plotly"})
    text = capsys.readouterr().out
    assert re.search(r"run +failed: node trainer exited after 0:00", text)
    assert re.search(r"no report +no plotly", text)


def test_a_mismatch_above_the_threshold_warns_once_a_phase(capsys: pytest.CaptureFixture[str], simulation: Any) -> None:
    fresh = [r for r in simulation.metrics if not r.get("staleness/max")]
    worst = max(r.get("mismatch/abs_logprob_diff_mean", 0.0) for r in fresh)
    play(simulation, managed(mismatch_alarm=worst * 0.9))
    assert capsys.readouterr().out.count("warning: trainer and rollout differ by") == 1
    play(simulation, managed(mismatch_alarm=worst))
    assert "warning" not in capsys.readouterr().out


# ---------------------------------------------------------------- lost nodes and resumes


def in_the_last_epoch(run: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What an observer of the last epoch is shown of the past, and then gets."""
    resumed = [e for e in run.events if e["kind"] == "resumed"][-1]
    void = VoidEvents(msgspec.convert(e, Resumed) for e in run.events if e["kind"] == "resumed")
    past = [e for e in run.events[: resumed["seq"]] if e["seq"] not in void]
    return past, run.events[resumed["seq"] :]


def test_a_lost_node_is_told_when_it_goes_and_when_it_is_back(capsys: pytest.CaptureFixture[str], mishaps: Any) -> None:
    manager = managed()
    manager.run_opened("runs/a", JOB)
    for event in mishaps.events[: next(e["seq"] for e in mishaps.events if e["kind"] == "resumed")]:
        manager.event(event)
    assert not manager.disabled
    lines = [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()]
    story = [line for line in lines if "rollout-1" in line]
    assert story == [
        "starting rollout-1",
        "rollout-1 lost: was killed by signal 9",
        "starting rollout-1 again",
        "rollout-1 serves again",
    ]


def test_a_loss_that_is_repeated_is_told_again_only_now_and_then(
    capsys: pytest.CaptureFixture[str], simulation: Any
) -> None:
    manager = managed()
    manager.run_opened("runs/a", JOB)
    lost = {**simulation.events[1], "kind": "node_stopped", "node": "environment-0/scoring", "reason": "no score"}
    for _ in range(120):
        manager.event(lost)
    manager.event({**lost, "reason": "exit code 3"})
    assert [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines() if "lost" in line] == [
        "environment-0/scoring lost: no score",
        "environment-0/scoring lost 10 times: no score",
        "environment-0/scoring lost 100 times: no score",
        "environment-0/scoring lost: exit code 3",
    ]


def test_a_node_that_is_started_again_is_told_at_each_loss(capsys: pytest.CaptureFixture[str], simulation: Any) -> None:
    manager = managed()
    manager.run_opened("runs/a", JOB)
    started = next(e for e in simulation.events if e["kind"] == "node_started" and e["role"] == "rollout")
    for _ in range(2):
        manager.event(started)
        manager.event({**started, "kind": "node_stopped", "reason": "was killed by signal 9"})
    assert capsys.readouterr().out.count(f"{started['node']} lost: was killed by signal 9\n") == 2


def test_a_node_that_ends_with_the_run_is_not_lost(capsys: pytest.CaptureFixture[str], simulation: Any) -> None:
    manager = managed()
    manager.run_opened("runs/a", JOB)
    manager.event({**simulation.events[1], "kind": "node_stopped", "reason": "ended"})
    assert "lost" not in capsys.readouterr().out


def test_a_resumed_run_is_shown_from_where_it_goes_on(capsys: pytest.CaptureFixture[str], mishaps: Any) -> None:
    past, rest = in_the_last_epoch(mishaps)
    manager = managed(interval_seconds=0.0)
    manager.run_opened("runs/a", JOB)
    manager.run_resumed(lambda: iter(past))
    metrics = iter([m for m in mishaps.metrics if m["time"] >= rest[0]["time"]])
    for event in rest:
        manager.event(event)
        if event["kind"] == "batch_trained":
            manager.metrics(next(metrics))
    assert not manager.disabled
    text = capsys.readouterr().out
    assert "resuming from version 10, batch 7 of phase reinforce" in text
    assert re.findall(r"\] reinforce (\d+)/12", text) == [str(step) for step in range(8, 13)]
    assert text.count("starting rollout-1\n") == 1, "its loss is of an earlier epoch"
    assert "storage-0 lost: was killed by signal 9" in text


# ---------------------------------------------------------------- on a terminal


class Terminal:
    """A pseudo-terminal of 100 x 40. What is written to ``stream`` can be read as a terminal would get it."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        os.set_blocking(self._master, False)
        self.stream = open(slave, "w", encoding="utf-8")  # noqa: SIM115  # closed by close()
        self._parts: list[bytes] = []

    def read(self, *_: object) -> None:
        """Make room: a terminal that nobody reads blocks its writer after a few thousand bytes."""
        self.stream.flush()
        while True:
            try:
                self._parts.append(os.read(self._master, 1 << 16))
            except BlockingIOError:
                return

    def text(self) -> str:
        """Everything so far."""
        self.read()
        return b"".join(self._parts).decode()

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A terminal to attach; the panel's thread sleeps, so that it is drawn at the start and at the end only."""
    monkeypatch.setattr("headrace_observers.console.REFRESH_PER_SECOND", 1e-3)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    yield terminal
    terminal.close()


def attach(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """stdout and stderr go to the terminal. Not in the fixture: the test runner sets both before it calls a test."""
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    monkeypatch.setattr(sys, "stderr", terminal.stream)


def last_panel(text: str) -> str:
    """The panel as it stands at the end, without control sequences."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")
    return text[text.rindex("╭") : text.rindex("╯")]


def test_on_a_terminal_a_panel_shows_where_the_run_stands(
    terminal: Terminal, simulation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(terminal, monkeypatch)
    manager = managed()
    play(simulation, manager, at_batch=terminal.read)
    assert not manager.disabled
    panel = last_panel(terminal.text())
    for shown in (
        r"─ sort-symbols ─",
        r"reinforce  phase 2 of 2  step 12 of 12",
        r"reward +[\d.]+ +[▁▂▃▄▅▆▇█]{12}",
        r"held-out +\d+% sampled · \d+% greedy  at version \d+, began at \d+% sampled",
        r"staleness +[\d.]+ mean · \d max · 2 allowed",
        r"tokens/s +[\d,]+ sampled · [\d,]+ trained",
        r"trainer idle +\d+%",
        r"version +15 newest · \d live",
        r"groups +0 in flight · 0 buffered · dropped: \d+ run_ended",
    ):
        assert re.search(shown, panel), panel


def test_on_a_terminal_logging_and_printing_appear_above_the_panel_as_whole_lines(
    terminal: Terminal, simulation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(terminal, monkeypatch)
    logger, handler = logging.getLogger("test-console"), logging.StreamHandler(terminal.stream)
    logger.addHandler(handler)

    def speak(batch: int) -> None:
        if batch == 5:
            logger.warning("a warning of\ntwo lines")
            print("a printed line")
        terminal.read()

    try:
        play(simulation, managed(), at_batch=speak)
    finally:
        logger.removeHandler(handler)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.text()).replace("\r", "\n")
    lines = text.split("\n")
    for line in ("a warning of", "two lines", "a printed line"):
        assert line in lines
        assert lines.index(line) < max(i for i, shown in enumerate(lines) if shown.startswith("╭"))
    assert handler.stream is terminal.stream


def test_the_terminal_is_given_back_when_the_console_is_switched_off(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attach(terminal, monkeypatch)
    manager = managed()
    manager.run_opened("runs/a", JOB)
    assert sys.stdout is not terminal.stream
    manager.event({"kind": "batch_taken", "version": 0, "groups": [7]})
    assert manager.disabled == {"console": "event: KeyError: 7"}
    assert sys.stdout is terminal.stream
    assert sys.stderr is terminal.stream
    text = terminal.text()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is still hidden"


def test_a_log_that_goes_to_a_file_keeps_going_there(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    attach(terminal, monkeypatch)
    with open(tmp_path / "err.log", "w", encoding="utf-8") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        manager = managed()
        manager.run_opened("runs/a", JOB)
        print("to the file", file=sys.stderr)
        manager.run_closed("completed", {})
    assert (tmp_path / "err.log").read_text() == "to the file\n"
    assert "to the file" not in terminal.text()


# ---------------------------------------------------------------- what it counts


def test_groups_are_counted_where_they_are(simulation: Any) -> None:
    progress = Progress(JOB)
    members: dict[int, set[int]] = {}
    waiting: set[int] = set()
    for event in simulation.events:
        progress.event(event)
        match event["kind"]:
            case "group_dispatched":
                members[event["group"]] = set(event["trajectories"])
            case "row_stored":
                members[event["group"]].discard(event["row"])
                if not members[event["group"]]:
                    del members[event["group"]]
                    waiting.add(event["group"])
            case "batch_taken":
                waiting -= set(event["groups"])
            case "group_dropped":
                members.pop(event["group"], None)
                waiting.discard(event["group"])
        assert (progress.in_flight, progress.buffered) == (len(members), waiting)


def test_after_a_resume_the_groups_are_counted_as_if_nothing_had_been_void(mishaps: Any) -> None:
    past, rest = in_the_last_epoch(mishaps)
    progress, ready = Progress(JOB), mishaps.states[-1].ready
    for event in [*past, rest[0]]:
        progress.event(event)
    assert (progress.in_flight, progress.buffered) == (0, {group for _, group in ready})
    for event in rest[1:]:
        progress.event(event)
    assert (progress.in_flight, progress.buffered, progress.step) == (0, set(), 12)
