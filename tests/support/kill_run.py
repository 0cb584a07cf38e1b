"""A data plane of real processes, some of which are killed at random moments."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

from headrace.dataplane import DataPlane, Partition
from headrace.dataplane.messages import Described
from support import kill_roles as roles
from support.kill_checks import figures, read_books, violations

CONSUMERS, UNITS = 4, 2
GAP = (0.2, 1.2)
"""Seconds between one that is killed and the next."""
UNIT_SHARE = 0.35
PATIENCE = 90.0


@dataclass
class Outcome:
    """``violations``: rules that did not hold, in words."""

    seed: int
    kills: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class KillRun:
    """``directory``: private, short, empty."""

    def __init__(self, directory: Path, *, seed: int) -> None:
        self.outcome = Outcome(seed)
        self._directory = directory
        self._chance = Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["headrace.dataplane.serve", "headrace_storage.memory"])
        self._units: dict[str, BaseProcess] = {}
        self._consumers: dict[str, BaseProcess] = {}
        self._producers: dict[str, BaseProcess] = {}
        self._ledger: BaseProcess | None = None
        self._started = 0

    def run(self, seconds: float) -> Outcome:
        """Kill for ``seconds``, let all come to rest, and check."""
        begun = time.monotonic()
        plane = DataPlane(roles.address_of(self._directory, "ledger"))
        try:
            self._start_all()
            partition = plane.create(roles.SPEC)
            self._kill_for(seconds)
            self._rest(plane, partition)
        finally:
            plane.close()
            self._end_all()
        books = read_books(self._directory)
        self.outcome.figures = figures(books)
        self.outcome.violations += violations(books)
        self.outcome.seconds = time.monotonic() - begun
        return self.outcome

    # ------------------------------------------------------------ processes

    def _start(self, role: Callable[..., None], name: str, *rest: Any) -> BaseProcess:
        process = self._context.Process(target=role, args=(self._directory, name, *rest), daemon=True)
        process.start()
        return process

    def _start_all(self) -> None:
        self._ledger = self._start(roles.ledger, "ledger")
        for _ in range(UNITS):
            self._start_unit()
        for number in range(roles.PRODUCERS):
            name = f"producer-{number}"
            self._producers[name] = self._start(roles.producer, name, number)
        for number in range(CONSUMERS):
            self._start_consumer(sorted(roles.TASKS)[number % len(roles.TASKS)])

    def _start_unit(self) -> None:
        self._started += 1
        name = f"unit-{self._started}"
        self._units[name] = self._start(roles.unit, name)

    def _start_consumer(self, task: str) -> None:
        self._started += 1
        name = f"{task}-{self._started}"
        self._consumers[name] = self._start(roles.consumer, name, task)

    def _end_all(self) -> None:
        ledger = [] if self._ledger is None else [self._ledger]
        for process in [*self._producers.values(), *self._consumers.values(), *self._units.values(), *ledger]:
            process.kill()
            process.join()

    # ------------------------------------------------------------ kills

    def _kill_for(self, seconds: float) -> None:
        begun = time.monotonic()
        joins_at = begun + seconds * self._chance.uniform(0.2, 0.8)
        while (now := time.monotonic()) < begun + seconds:
            self._watch(min(self._chance.uniform(*GAP), begun + seconds - now))
            if joins_at is not None and time.monotonic() >= joins_at:
                self._start_unit()
                joins_at = float("inf")
            self.outcome.kills.append(f"{time.monotonic() - begun:.1f} s: {self._kill_one()}")

    def _kill_one(self) -> str:
        if self._chance.random() < UNIT_SHARE:
            name = self._chance.choice(sorted(self._units))
            self._kill(self._units.pop(name))
            self._start_unit()
        else:
            name = self._chance.choice(sorted(self._consumers))
            self._kill(self._consumers.pop(name))
            self._start_consumer(name.split("-")[0])
        return name

    def _kill(self, process: BaseProcess) -> None:
        process.kill()
        process.join()

    def _watch(self, seconds: float) -> None:
        """Let time pass. Nobody ends of itself, but a unit that was too slow to be heard of and was given up."""
        everybody = {**self._units, **self._consumers, **self._producers}
        if self._ledger is not None:
            everybody["ledger"] = self._ledger
        wait([process.sentinel for process in everybody.values()], timeout=seconds)
        for name, process in everybody.items():
            if process.exitcode is None:
                continue
            log = (self._directory / f"{name}.log").read_text()
            if name in self._units and "was given up" in log:
                del self._units[name]
                self._start_unit()
                self.outcome.kills.append(f"{name} was given up")
            elif process.exitcode == 0 and self._may_end(name):
                self._producers.pop(name, None)
                self._consumers.pop(name, None)
            else:
                raise RuntimeError(f"{name} ended with {process.exitcode}: {log[-2000:]}")

    def _may_end(self, name: str) -> bool:
        word = roles.STOP if name in self._producers else roles.END
        return (self._directory / word).exists()

    # ------------------------------------------------------------ rest

    def _rest(self, plane: DataPlane, partition: Partition) -> None:
        """In order: no new prompts, every lost group named, its prompt put again, all rows acknowledged, all freed."""
        self._say(roles.STOP)
        self._until(lambda: set(self._producers) <= {"producer-0"}, "producers end")
        self._until(lambda: self._reachable(plane) == len(self._units), "killed units are missed, and others known")
        self._say(roles.LAST)
        self._until(lambda: not self._producers, "the prompts of lost groups are put again")
        self._until(lambda: partition.stats().rows == 0, "every row is acknowledged by every task")
        self._say(roles.END)
        living = plane.partition(partition.spec.name)
        self._until(lambda: not any(stats.nbytes for stats in living.unit_stats()), "the units keep nothing")

    def _reachable(self, plane: DataPlane) -> int:
        described = plane.client().call("describe", roles.SPEC.name, reply=Described, deadline=PATIENCE)
        return len(described.units) - described.units.count("")

    def _say(self, word: str) -> None:
        (self._directory / word).touch()

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > end:
                self.outcome.violations.append(f"it never came true that {what}")
                return
            self._watch(0.05)
