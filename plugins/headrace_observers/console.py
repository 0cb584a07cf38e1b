"""The ``console`` observer: a live panel on a terminal, plain lines in a file or a pipe.

Invariant: nothing that is printed or logged while the panel is up can tear it, and whatever ends the run, the
terminal is left as it was.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.text import Text

from headrace.hooks import Observer, hookimpl
from headrace_observers.display import accuracy, clock, closing, model_line, panel, phase_line, step_line
from headrace_observers.progress import Progress

REFRESH_PER_SECOND = 4
MISMATCH = "mismatch/abs_logprob_diff_mean"


class Console(Observer):
    """Shows a run to the person who started it."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        """Keys of the observer's table."""

        interval_seconds: float = 5.0
        """Without a terminal: at most one line of progress in this time."""
        mismatch_alarm: float = 0.05
        """Warn when trainer and rollout differ by more nats per token, on average over a batch without stale rows."""

    settings: Settings

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._progress = Progress({})
        self._screen: _Terminal | _Lines | None = None
        self._opened = time.monotonic()
        self._last_line = float("-inf")
        self._alarmed = False
        self._losses: Counter[tuple[str, str]] = Counter()
        """(Node, reason) → how often it was lost so since it was started."""

    # ------------------------------------------------------------ hooks

    @hookimpl
    def run_opened(self, run_dir: str, job: Mapping[str, Any]) -> None:
        """Start to show."""
        self._progress = Progress(job)
        self._opened = time.monotonic()
        console = RichConsole()
        if console.is_terminal and not console.is_dumb_terminal:
            self._screen = _Terminal(console, self._progress, self._elapsed)
        else:
            self._screen = _Lines(console, self._elapsed)
        self._screen.say(f"run directory {run_dir}")

    @hookimpl
    def run_resumed(self, past: Callable[[], Iterator[Mapping[str, Any]]]) -> None:
        """Know what has happened, without showing it again."""
        for event in past():
            self._progress.event(event)
        if self._screen is not None:
            phase = self._progress.phase
            where = f", batch {self._progress.step} of phase {phase.name}" if phase is not None else ""
            self._screen.say(f"resuming from version {self._progress.version}{where}")

    @hookimpl
    def notice(self, text: str) -> None:
        """Say it."""
        if self._screen is not None:
            self._screen.say(text)

    @hookimpl
    def event(self, event: Mapping[str, Any]) -> None:
        """Keep count; phases, evaluations, and nodes that are lost and come back are worth a line."""
        if self._screen is None:
            return
        lost = self._progress.lost
        back = event["kind"] == "instance_version" and event["instance"] in lost
        with self._screen.lock:
            self._progress.event(event)
        if back:
            self._screen.say(f"{event['instance']} serves again")
        match event["kind"]:
            case "run_started":
                self._screen.progress(model_line(self._progress))
            case "node_started" if event["node"] in lost:
                self._losses = Counter({loss: n for loss, n in self._losses.items() if loss[0] != event["node"]})
                self._screen.say(f"starting {event['node']} again")
            case "node_started":
                self._screen.progress(f"starting {event['node']}")
            case "node_stopped" if event["node"] in lost and event["reason"] != "ended":
                self._node_lost(event["node"], event["reason"])
            case "phase_started":
                self._phase_started()
            case "evaluation_finished":
                newest = next(e for e in self._progress.evaluations if e.version == event["version"])
                self._screen.progress(f"version {newest.version}: held-out {accuracy(newest).replace(' · ', ', ')}")

    def _node_lost(self, node: str, reason: str) -> None:
        """Scoring processes are replaced without an event, and a reward may hang on many prompts: a loss that is
        repeated is told again when it is the 10th, the 100th and so on."""
        assert self._screen is not None
        self._losses[node, reason] += 1
        count = self._losses[node, reason]
        if math.log10(count).is_integer():
            times = f" {count} times" if count > 1 else ""
            self._screen.say(f"{node} lost{times}: {reason}", style="yellow")

    def _phase_started(self) -> None:
        assert self._screen is not None
        self._alarmed = False
        if self._progress.phase is not None and self._progress.phase.number == 1:
            self._screen.progress(f"every node serves after {self._elapsed():.1f} s")
        self._screen.progress(phase_line(self._progress))

    @hookimpl
    def metrics(self, record: Mapping[str, Any]) -> None:
        """A batch is trained."""
        if self._screen is None:
            return
        with self._screen.lock:
            self._progress.metrics(record)
        self._watch_mismatch()
        phase, now = self._progress.phase, time.monotonic()
        last = phase is not None and self._progress.step >= phase.steps
        if phase is not None and (last or now - self._last_line >= self.settings.interval_seconds):
            self._last_line = now
            self._screen.progress(step_line(self._progress))

    @hookimpl
    def run_closed(self, status: str, summary: Mapping[str, Any]) -> None:
        """Take the panel down and sum up."""
        if self._screen is None:
            return
        self._screen.close()
        console = self._screen.console
        ascii_only = console.options.ascii_only
        for part in closing(status, summary, elapsed=self._elapsed(), ascii_only=ascii_only):
            console.print(part, soft_wrap=isinstance(part, Text))

    def close(self) -> None:
        """Give the terminal back."""
        if self._screen is not None:
            self._screen.close()

    # ------------------------------------------------------------ what it watches

    def _elapsed(self) -> float:
        return time.monotonic() - self._opened

    def _watch_mismatch(self) -> None:
        """Once a phase: a growing gap between engines shows long before the reward falls."""
        if (self._progress.number("staleness/max") or 0) > 0:
            return  # older rows differ because the policy has moved on
        gap, bound = self._progress.number(MISMATCH), self.settings.mismatch_alarm
        if self._screen is None or self._alarmed or gap is None or gap <= bound:
            return
        self._alarmed = True
        self._screen.say(
            f"warning: trainer and rollout differ by {gap:.3g} nats per token on average at version "
            f"{self._progress.latest['version']}, more than mismatch_alarm = {bound:g}; compare the engines' dtype, "
            "temperature and model config, or lower max_staleness",
            style="yellow",
        )


class _Lines:
    """For files and pipes: timestamped lines, never wrapped."""

    def __init__(self, console: RichConsole, elapsed: Callable[[], float]) -> None:
        self.console = console
        self.lock = threading.Lock()
        self._elapsed = elapsed

    def say(self, line: str, *, style: str = "") -> None:
        """A line worth reading in any case."""
        self.progress(line)

    def progress(self, line: str) -> None:
        """A line of progress."""
        print(f"[{clock(self._elapsed()):>7}] {line}", flush=True)

    def close(self) -> None:
        """Nothing to give back."""


class _Terminal:
    """A panel that a thread redraws, with everything else that reaches the terminal printed above it."""

    def __init__(self, console: RichConsole, progress: Progress, elapsed: Callable[[], float]) -> None:
        self.console = console
        self.lock = threading.Lock()
        self._progress = progress
        self._elapsed = elapsed
        self._live = Live(
            console=console,
            refresh_per_second=REFRESH_PER_SECOND,
            get_renderable=self._panel,
            # Where stderr goes to a file, it keeps going there.
            redirect_stderr=sys.stderr.isatty(),
        )
        self._borrowed: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        self._live.start()
        self._borrow_log_handlers()

    def _panel(self) -> RenderableType:
        with self.lock:
            ascii_only = self.console.options.ascii_only
            return panel(self._progress, elapsed=self._elapsed(), ascii_only=ascii_only)

    def _borrow_log_handlers(self) -> None:
        """Handlers hold on to the stream they were made with; those that write to the terminal go through the
        panel's proxy while it is up."""
        loggers = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
        for handler in {h for logger in loggers for h in logger.handlers}:
            if isinstance(handler, logging.StreamHandler) and handler.stream and handler.stream.isatty():
                self._borrowed.append((handler, handler.stream))
                handler.setStream(cast(TextIO, FileProxy(self.console, handler.stream)))

    def say(self, line: str, *, style: str = "") -> None:
        """A line above the panel."""
        self.console.print(Text(line, style=style))

    def progress(self, line: str) -> None:
        """The panel shows it."""

    def close(self) -> None:
        """Leave the last panel on the screen; may be called twice."""
        self._live.stop()
        for handler, stream in self._borrowed:
            handler.setStream(stream)
        self._borrowed.clear()
