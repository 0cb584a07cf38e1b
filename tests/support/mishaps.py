"""A simulated run that loses an instance and a storage unit, and is resumed from checkpoints."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, NamedTuple

from support.simulated_run import Simulation

LOST_INSTANCE = "rollout-1"
SIGNAL = "was killed by signal 9"
CRASHES = {4: ("killed", "failed"), 7: ("killed",)}
"""Step of a checkpoint → how often the run ends after it, and how: without a word, or saying so."""


class State(NamedTuple):
    """What a checkpoint keeps."""

    events: int
    version: int
    step: int
    group: int
    ready: list[tuple[int, int]]
    in_flight: list[int]


class Mishaps(Simulation):
    """Three resumes, the second of which makes the first void; a lost instance after step 1; an instance that joins
    and leaves after step 2; a batch released with its storage unit after step 10."""

    def __init__(self, **shape: Any) -> None:
        self._slots = shape.get("slots", 24)
        self._crashes = {step: deque(ends) for step, ends in CRASHES.items()}
        self._restart: deque[int] = deque()
        self._down: set[str] = set()
        self._losses = {1, 10}
        """Steps after which a node is lost."""
        self._joins = True
        """Whether an instance is still to join and leave."""
        self.states: list[State] = []
        super().__init__(**shape)

    def _between_batches(self) -> None:
        if not self._rollout:
            return
        if self._step == 1 and self._step in self._losses:
            self._losses.discard(1)
            self._at(0.2, self._lose_instance)
        if self._step == 2 and self._joins:
            self._joins = False
            self._join_and_leave()
        if self._step in self._crashes and not any(state.step == self._step for state in self.states):
            self._checkpoint()

    # ------------------------------------------------------------ lost nodes

    def _lose_instance(self) -> None:
        name, other = LOST_INSTANCE, next(n for n in self._free if n != LOST_INSTANCE)
        displaced = {t: place for t, place in self._playing.items() if place.instance == name}
        if any(place.version > self._served[other] for place in displaced.values()):
            return self._at(0.05, self._lose_instance)
        self._emit("node_stopped", node=name, reason=SIGNAL)
        self._down.add(name)
        self._free[name], self._served[name] = 0, -1
        for trajectory, place in displaced.items():
            self._emit(
                "trajectory_failed",
                trajectory=trajectory,
                group=place.group,
                reason="instance_lost",
                attempt=place.number,
            )
        self._emit("node_started", node=name, role="rollout", pid=900)
        for place in displaced.values():
            place.move(other)
        self._at(0.8, self._serve_again)
        return None

    def _serve_again(self) -> None:
        """Checked while it loads the version, so before it commits."""
        self._down.discard(LOST_INSTANCE)
        self._free[LOST_INSTANCE] = self._slots
        self._self_check(LOST_INSTANCE, self._version)
        self._served[LOST_INSTANCE] = self._version
        self._commit(LOST_INSTANCE, self._version)

    def _commit(self, name: str, version: int) -> None:
        if name not in self._down:
            super()._commit(name, version)

    def _train(self, *, wait: float) -> None:
        if self._rollout and self._step == 10 and self._step in self._losses:
            self._losses.discard(10)
            self._lose_storage()
        else:
            super()._train(wait=wait)

    def _lose_storage(self) -> None:
        groups = [group for _, group in self._ready[: self._batch_groups]]
        rows = [group * self._group_size + i for group in groups for i in range(self._group_size)]
        batch = {"version": self._version, "groups": groups, "rows": rows}
        self._emit("batch_taken", **batch)
        self._emit("node_stopped", node="storage-0", reason=SIGNAL)
        self._emit("batch_released", **batch, reason="storage_lost")
        for _, group in self._ready:
            members = list(range(group * self._group_size, (group + 1) * self._group_size))
            self._emit("group_dropped", group=group, trajectories=members, reason="storage_lost")
        self._ready.clear()
        self._emit("node_started", node="storage-0", role="storage", pid=901)
        self._idle_since = self._now
        self._at(0.1, self._pump)

    # ------------------------------------------------------------ scaling

    def _join_and_leave(self) -> None:
        """Another instance is ready too late to be given anything before it has to leave."""
        name = "rollout-9"
        self._emit("node_started", node=name, role="rollout", pid=902)
        self._self_check(name, self._version)
        self._emit(
            "instance_version",
            instance=name,
            version=self._version,
            digest=self._digest(self._version),
            transfer_seconds=0.1,
            nbytes=1,
        )
        self._emit("instance_draining", instance=name)
        self._emit("instance_left", instance=name)
        self._emit("node_stopped", node=name, reason="ended")

    # ------------------------------------------------------------ resumes

    def _checkpoint(self) -> None:
        state = State(
            len(self.events), self._version, self._step, self._group, list(self._ready), sorted(self._waiting)
        )
        self.states.append(state)

        def saved() -> None:
            self._emit("checkpoint_saved", version=state.version, path=_path(state), events=state.events)
            self._at(0.9, lambda: self._crash(state))

        self._at(0.05, saved)

    def _crash(self, state: State) -> None:
        ends = self._crashes[state.step]
        if ends.popleft() == "failed":
            self._emit("run_finished", status="failed", reason="node trainer (pid 200) was killed by signal 9")
        self._now += 2.0
        self._epoch += 1
        self._emit(
            "resumed",
            version=state.version,
            checkpoint=_path(state),
            events=state.events,
            restarted=state.in_flight,
        )
        self._restore(state)
        self._start_nodes()
        if ends:
            self._at(1.2, lambda: self._crash(state))
        self._publish(state.version)
        if state.version % self._evaluate_every == 0:
            self._evaluate()
        self._idle_since = self._now
        self._pump()

    def _restore(self, state: State) -> None:
        self._queue.clear()
        self._playing.clear()
        self._waiting.clear()
        self._live.clear()
        self._evaluating.clear()
        self._down.clear()
        self._generating = Counter()
        self._version, self._step, self._group = state.version, state.step, state.group
        self._ready = list(state.ready)
        self._restart = deque(state.in_flight)
        self._free = dict.fromkeys(self._free, self._slots)
        self._served = dict.fromkeys(self._served, -1)
        self._blocked = False
        self._tokens = 0

    def _next_group(self) -> int:
        return self._restart.popleft() if self._restart else super()._next_group()


def _path(state: State) -> str:
    return f"runs/a/checkpoints/{state.version}"
