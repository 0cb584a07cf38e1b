"""A deterministic miniature of a run: two instances, a trainer and the gating of ``multi_version`` on a virtual clock,
written as the controller would write it."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from support.run_files import REINFORCE, START, WARM_UP, RunFiles, learning, samples

MOVES = 10
"""Every so many-th trajectory moves in the middle of its answer, if it can."""


class Try(NamedTuple):
    """A trajectory at an instance; ``move`` generates it again on another one."""

    instance: str
    version: int
    group: int
    number: int
    move: Callable[[str], None]


class Simulation(RunFiles):
    """Events and records of a run of ``warm_up`` supervised and ``steps`` reinforcement batches."""

    def __init__(
        self,
        *,
        steps: int = 12,
        warm_up: int = 3,
        batch_groups: int = 4,
        group_size: int = 4,
        max_staleness: int = 2,
        slots: int = 24,
        evaluate_every: int = 5,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.job = {
            "job": {"name": "sort-symbols", "seed": 0},
            "rollout": {"use": "torch", "instances": 2, "max_new_tokens": 36, "temperature": 1.0},
            "phase": [{"name": WARM_UP, "steps": warm_up}, {"name": REINFORCE, "steps": steps}],
        }
        self._random = random.Random(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._steps, self._warm_up, self._batch_groups, self._group_size = steps, warm_up, batch_groups, group_size
        self._k, self._evaluate_every = max_staleness, evaluate_every
        self._oversupply = min(max_staleness, 1.5)
        self._free = {"rollout-0": slots, "rollout-1": slots}
        self._served = {name: -1 for name in self._free}
        self._version = self._group = self._step = 0
        self._trained_at = START
        self._live: set[int] = set()
        self._evaluating: set[int] = set()
        self._waiting: dict[int, tuple[int, list[int]]] = {}
        """Group → (version, members) until stored."""
        self._playing: dict[int, Try] = {}
        """Trajectory → its present try."""
        self._generating: Counter[int] = Counter()
        self._ready: list[tuple[int, int]] = []
        self._rewards: dict[int, float] = {}
        self._blocked = self._rollout = self._done = False
        self._idle_since: float | None = None
        self._tokens = 0
        self._run()

    # ------------------------------------------------------------ clock

    def _at(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self._now + delay, len(self._queue) + len(self.events) * 1000, action))

    def _run(self) -> None:
        phases = [WARM_UP, REINFORCE] if self._warm_up else [REINFORCE]
        self._emit("run_started", job="sort-symbols", seed=0, instances=list(self._free), phases=phases)
        self._start_nodes()
        self._publish(0)
        if self._warm_up:
            self._phase(WARM_UP, rollout=False)
            for _ in range(self._warm_up):
                self._demonstrate()
        self._phase(REINFORCE, rollout=True)
        self._evaluate()
        self._idle_since = self._now
        self._pump()
        while self._queue and not self._done:
            self._now, _, action = heapq.heappop(self._queue)
            action()
        self._finish()

    def _start_nodes(self) -> None:
        roles = {"trainer": "trainer", "storage-0": "storage", **dict.fromkeys(self._free, "rollout")}
        for pid, (node, role) in enumerate(roles.items(), 100 * (self._epoch + 1)):
            self._emit("node_started", node=node, role=role, pid=pid)
        self._now += 2.0

    def _phase(self, name: str, *, rollout: bool) -> None:
        self._rollout, self._step, self._trained_at = rollout, 0, self._now
        self._emit(
            "phase_started",
            phase=name,
            algorithm="grpo" if rollout else "supervised",
            policy="multi_version" if rollout else "synchronous",
            max_staleness=self._k if rollout else 0,
            batch_groups=self._batch_groups,
            group_size=self._group_size,
            steps=self._steps if rollout else self._warm_up,
            **{"interrupts": False, "greedy": False, "rollout": rollout, "version": self._version},
            **{"until": None, "stages": []},
        )

    # ------------------------------------------------------------ versions

    def _digest(self, version: int) -> str:
        return f"{version * 2654435761 % 2**64:016x}"

    def _publish(self, version: int) -> None:
        self._version = version
        self._live.add(version)
        self._emit("version_published", version=version, digest=self._digest(version), nbytes=1_742_000)
        for name in self._served:
            if self._rollout and version:
                self._at(0.05 + 0.1 * self._random.random(), lambda n=name, v=version: self._commit(n, v))
            else:
                self._commit(name, version)
        self._retire()

    def _commit(self, name: str, version: int) -> None:
        unchecked, self._served[name] = self._served[name] < 0, version
        fetched = {"transfer_seconds": 0.1, "nbytes": 1_742_000}
        self._emit("instance_version", instance=name, version=version, digest=self._digest(version), **fetched)
        if unchecked:
            self._self_check(name, version)
        self._pump()

    def _self_check(self, name: str, version: int) -> None:
        self._emit("self_check", instance=name, version=version, mean_abs_logprob_diff=3e-6, tolerance=1e-3)

    def _retire(self) -> None:
        for version in sorted(self._live - {self._version} - self._evaluating):
            if not self._generating[version]:
                self._live.discard(version)
                self._emit("version_retired", version=version)

    # ------------------------------------------------------------ demonstrations

    def _demonstrate(self) -> None:
        groups = [self._dispatch("", instance_of=lambda _: "") for _ in range(self._batch_groups)]
        for group in groups:
            version, members = self._waiting[group]
            for member in members:
                self._now += 0.001
                self._answered(member, group, "", version, self._now - 0.001, spans=[], tokens=12)
            self._store(group)
        self._train(wait=0.05)

    # ------------------------------------------------------------ rollout

    def _pump(self) -> None:
        """Admit groups, then see whether the trainer can go on."""
        if not self._rollout or self._done:
            return
        while self._admissible():
            free = dict(self._free)
            places: list[str] = []
            for _ in range(self._group_size):
                name = max(free, key=lambda n: (self._served[n] == self._version, free[n]))
                free[name] -= 1
                places.append(name)
            self._dispatch("rollout", instance_of=lambda i, p=places: p[i])
        if self._idle_since is not None and not self._blocked and len(self._ready) >= self._batch_groups:
            wait, self._idle_since = self._now - self._idle_since, None
            self._train(wait=wait)

    def _admissible(self) -> bool:
        outstanding = len(self._waiting) + len(self._ready)
        free = sum(slots for name, slots in self._free.items() if self._served[name] == self._version)
        return outstanding < self._oversupply * self._batch_groups and free >= self._group_size

    def _dispatch(self, kind: str, *, instance_of: Callable[[int], str]) -> int:
        group, version = self._next_group(), self._version
        members = list(range(group * self._group_size, (group + 1) * self._group_size))
        self._waiting[group] = (version, members)
        self._generating[version] += 1
        self._emit("group_dispatched", group=group, task=group, version=version, trajectories=members)
        unfinished = set(members)
        for index, member in enumerate(members):
            name = instance_of(index)
            self._start(member, group, name, version, 0)
            if kind:
                self._generate(member, group, name, version, unfinished)
        return group

    def _next_group(self) -> int:
        self._group += 1
        return self._group - 1

    def _generate(
        self, member: int, group: int, name: str, version: int, unfinished: set[int], *, attempt: int = 0
    ) -> None:
        tokens = min(36, max(3, round(self._random.lognormvariate(2.4 + 0.02 * version**0.5, 0.5))))
        self._free[name] -= 1
        started = self._now

        def move(other: str) -> None:
            self._start(member, group, other, version, attempt + 1)
            self._generate(member, group, other, version, unfinished, attempt=attempt + 1)

        def go_on_elsewhere() -> None:
            nonlocal name, this
            other = next(n for n in self._free if n != name)
            if self._playing.get(member) is not this or self._served[other] != version:
                return
            self._free[name] += 1
            self._free[other] -= 1
            told = {"source": name, "target": other, "attempt": attempt, "prefilled_tokens": 0, "nbytes": 4096}
            self._emit("trajectory_moved", trajectory=member, group=group, version=version, tokens=14, **told)
            name = other
            this = self._playing[member] = this._replace(instance=other)

        def finished() -> None:
            if self._playing.get(member) is not this:
                return
            del self._playing[member]
            self._free[name] += 1
            self._tokens += tokens
            self._answered(member, group, name, version, started, spans=[[version, 0, tokens]], tokens=tokens)
            unfinished.discard(member)
            if not unfinished:
                self._at(0.02, stored)
            self._pump()

        def stored() -> None:
            self._store(group)
            self._pump()

        this = self._playing[member] = Try(name, version, group, attempt, move)
        if member % MOVES == 0:
            self._at(tokens * 0.01, go_on_elsewhere)
        self._at(tokens * (0.02 + 0.004 * self._random.random()), finished)

    def _start(self, member: int, group: int, name: str, version: int, attempt: int) -> None:
        self._emit(
            "trajectory_started", trajectory=member, group=group, version=version, instance=name, attempt=attempt
        )

    def _answered(
        self, member: int, group: int, name: str, version: int, started: float, *, spans: list[list[int]], tokens: int
    ) -> None:
        self._emit(
            "trajectory_finished",
            trajectory=member,
            group=group,
            instance=name,
            spans=spans,
            prompt_tokens=14,
            response_tokens=tokens,
            finish_reason="length" if tokens == 36 else "stop",
            started=started,
            finished=self._now,
        )

    def _store(self, group: int) -> None:
        version, members = self._waiting.pop(group)
        for member in members:
            reward = 1.0 if not self._rollout or self._random.random() < self._skill(version) else 0.0
            self._rewards[member] = reward
            self._emit("trajectory_scored", trajectory=member, reward=reward)
            self._emit("row_stored", row=member, trajectory=member, group=group, version=version, nbytes=640)
        self._generating[version] -= 1
        self._ready.append((version, group))
        self._ready.sort()
        self._unblock()
        self._retire()

    # ------------------------------------------------------------ trainer

    def _skill(self, version: int) -> float:
        return 0.05 + 0.9 / (1 + math.exp(-(version - 0.4 * (self._steps + self._warm_up)) / (0.12 * self._steps + 1)))

    def _train(self, *, wait: float) -> None:
        taken, self._ready = self._ready[: self._batch_groups], self._ready[self._batch_groups :]
        groups = [group for _, group in taken]
        rows = [group * self._group_size + i for group in groups for i in range(self._group_size)]
        version, started = self._version, self._now
        busy = 0.35 + 0.1 * self._random.random()
        self._emit("batch_taken", version=version, groups=groups, rows=rows)

        def trained() -> None:
            self._emit(
                "batch_trained",
                version=version,
                groups=groups,
                rows=rows,
                rewards=[self._rewards[row] for row in rows],
                applied=True,
                optimizer_steps=4,
                started=started,
                finished=self._now,
                wait_seconds=wait,
            )
            self._record(version, [version - v for v, _ in taken], wait, busy)
            self._step += 1
            self._blocked = True
            self._unblock()

        if self._rollout:
            self._at(busy, trained)
            self._pump()
        else:
            self._now += busy
            trained()

    def _unblock(self) -> None:
        """Publish as soon as nothing in flight would be too old."""
        limit = self._version + 1 - (self._k if self._rollout else 1)
        if not self._blocked or any(count and v <= limit for v, count in self._generating.items()):
            return
        self._blocked = False
        self._publish(self._version + 1)
        if self._rollout and self._version % self._evaluate_every == 0:
            self._evaluate()
        if self._rollout and self._step == self._steps:
            self._done = True
        self._between_batches()
        self._idle_since = self._now
        self._pump()

    def _between_batches(self) -> None:
        """A batch is trained and its version published."""

    def _record(self, version: int, staleness: list[int], wait: float, busy: float) -> None:
        skill, noise = self._skill(version), self._random.random
        elapsed, self._trained_at = max(self._now - self._trained_at, 1e-3), self._now
        record: dict[str, Any] = {
            "time": self._now,
            "phase": REINFORCE if self._rollout else WARM_UP,
            "step": self._step,
            "version": version,
            "train/loss": 2.2 * 0.7**version + 0.02 * noise() if not self._rollout else 0.02 * (noise() - 0.5),
            "train/gradient_norm": 0.4 + 0.3 * noise(),
            "train/learning_rate": 1e-3,
            "train/tokens_per_second": 9000 + 900 * noise(),
            "rollout/tokens_per_second": self._tokens / elapsed,
            "trainer/idle_share": wait / (wait + busy),
            "response/length": 12 + 3 * skill,
            "staleness/mean": sum(staleness) / len(staleness),
            "staleness/max": max(staleness),
        }
        if self._rollout:
            record |= learning(skill, staleness[0], noise)
        self._tokens = 0
        self.metrics.append(record)

    # ------------------------------------------------------------ evaluation and end

    def _evaluate(self) -> None:
        version, started = self._version, self._now
        self._evaluating.add(version)
        self._emit("evaluation_started", version=version)

        def finished() -> None:
            self._evaluating.discard(version)
            skill = self._skill(version)
            for mode in ("greedy", "sampled"):
                self.evaluations.append({"version": version, "mode": mode, "samples": samples(skill)})
            self._emit(
                "evaluation_finished",
                version=version,
                version_end=version,
                greedy_accuracy=min(1.0, skill + 0.05),
                sampled_accuracy=skill,
                prompts=64,
                failed={},
                started=started,
                finished=self._now,
            )
            self._retire()

        self._at(0.4, finished)

    def _finish(self) -> None:
        while self._evaluating:
            self._now, _, action = heapq.heappop(self._queue)
            action()
        open_groups = sorted([(g, m) for g, (_, m) in self._waiting.items()])
        open_groups += [(g, list(range(g * self._group_size, (g + 1) * self._group_size))) for _, g in self._ready]
        for group, members in open_groups:
            self._emit("group_dropped", group=group, trajectories=members, reason="run_ended")
        self._emit("run_finished", status="completed", reason="")
