"""An inference engine as a model: continuous batching over slots, with a KV cache that may run full.

Tokens are a fluid: all running requests gain them at the same rate, which falls as more run. So only the total of
steps is kept, a request is done when that total reaches a mark set at its admission, and an event costs O(log slots).

Invariant: requests are admitted in the order in which they came; one that was put back, because the KV cache was full,
comes before others and keeps its tokens, whose KV is computed again.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import simpy

from headrace.config import SimulationConfig

_EPSILON = 1e-6
"""Steps by which a sum of floats may fall short."""


class Request(NamedTuple):
    """A trajectory as an engine is given it, or hands it over."""

    trajectory: int
    context: float
    """Tokens that are there: the prompt, and what was generated before."""
    missing: float
    """Tokens to generate."""
    cached: float = 0.0
    """Tokens of the context whose KV comes along; of the others it is computed at admission."""


class Engine:
    """``finished`` is told of each trajectory whose last token is there, ``filled`` of the share of the KV cache in
    use whenever requests came or went, if it is limited. ``costs.step_seconds`` is set."""

    def __init__(
        self,
        environment: simpy.Environment,
        name: str,
        *,
        slots: int,
        costs: SimulationConfig,
        finished: Callable[[int], None],
        filled: Callable[[float], None] = lambda share: None,
    ) -> None:
        assert costs.step_seconds is not None, "checked when the scenario was made"
        self.name = name
        self.busy_seconds = 0.0
        """Of all slots, in which they had a request, up to the last :meth:`advance`."""
        self.prefilled_again = 0.0
        """Tokens whose KV was computed a second time."""
        self._environment = environment
        self._slots = slots
        self._step = [costs.step_seconds + costs.step_seconds_per_request * (n - 1) for n in range(slots + 1)]
        self._prefill = costs.prefill_seconds_per_token
        self._kv = float("inf") if costs.kv_tokens is None else float(costs.kv_tokens)
        self._finished = finished
        self._filled = filled
        self._waiting: deque[Request] = deque()
        self._running: dict[int, tuple[float, Request]] = {}
        """Trajectory → steps at its admission, and the request; in the order of admission."""
        self._marks: list[tuple[float, int]] = []
        """A heap of (steps, trajectory); an entry counts while the trajectory runs with that very mark."""
        self._steps = 0.0
        self._held = 0.0
        """Tokens in the KV cache, less steps for each running request."""
        self._since = 0.0
        self._stalled = 0.0
        """Nothing is decoded before this time."""
        self._due = float("inf")

    @property
    def running(self) -> int:
        """Requests in slots."""
        return len(self._running)

    def submit(self, request: Request) -> None:
        """A request arrives."""
        self.advance()
        self._waiting.append(request)
        self._settle()

    def hand_over(self, trajectory: int) -> Request | None:
        """A request leaves with the KV of its context; None when it is not here."""
        self.advance()
        self._settle()  # it may be done by now
        found = [self._stop(trajectory)] if trajectory in self._running else []
        for request in [waiting for waiting in self._waiting if waiting.trajectory == trajectory]:
            self._waiting.remove(request)
            found.append(request)
        self._settle()
        return found[0] if found else None

    def pause(self, seconds: float) -> None:
        """Decode nothing for a while, beyond what was paused for already."""
        self.advance()
        self._stalled = max(self._stalled, self._environment.now) + seconds
        self._plan()

    def prefill_again(self) -> None:
        """The KV of all trajectories in slots is of old weights, and computed anew; held-out answers keep theirs."""
        self.advance()
        running = self._running.values()
        tokens = sum(r.context + self._steps - begun for begun, r in running if r.trajectory >= 0)
        self.prefilled_again += tokens
        self._stalled = max(self._stalled, self._environment.now) + self._prefill * tokens
        self._plan()

    def stop(self) -> list[int]:
        """The process is gone, with all it had, which is returned."""
        self.advance()
        lost = [*self._running, *(request.trajectory for request in self._waiting)]
        self._waiting.clear()
        self._running.clear()
        self._marks.clear()
        self._held = 0.0
        self._due = float("inf")
        return lost

    def advance(self) -> None:
        """Account for the time until now."""
        now, running = self._environment.now, len(self._running)
        if running:
            self.busy_seconds += running * (now - self._since)
            self._steps += max(0.0, now - max(self._since, self._stalled)) / self._step[running]
        self._since = now

    # ------------------------------------------------------------ inside

    def _settle(self) -> None:
        """Let go what is done, admit what fits, and wait for the next change."""
        done = self._release()
        self._put_back()
        self._admit()
        self._plan()
        if self._kv < float("inf"):
            self._filled(self._used() / self._kv)
        for trajectory in done:
            self._finished(trajectory)

    def _release(self) -> list[int]:
        done: list[int] = []
        while self._marks and self._marks[0][0] <= self._steps + _EPSILON:
            mark, trajectory = heapq.heappop(self._marks)
            if self._mark(trajectory) == mark:
                self._free(trajectory)
                done.append(trajectory)
        return done

    def _put_back(self) -> None:
        while self._used() > self._kv - _EPSILON:
            trajectory = next(reversed(self._running))
            request = self._stop(trajectory)
            self._waiting.appendleft(request._replace(cached=0.0))
            self.prefilled_again += request.context

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting[0]
            if self._used() + request.context + len(self._running) + 1 > self._kv:
                break
            self._waiting.popleft()
            self._running[request.trajectory] = (self._steps, request)
            self._held += request.context - self._steps
            heapq.heappush(self._marks, (self._steps + request.missing, request.trajectory))
            if self._prefill:
                computed = request.context - request.cached
                self._stalled = max(self._stalled, self._environment.now) + self._prefill * computed

    def _free(self, trajectory: int) -> tuple[float, Request]:
        begun, request = self._running.pop(trajectory)
        self._held -= request.context - begun
        return begun, request

    def _stop(self, trajectory: int) -> Request:
        """A request leaves its slot before it is done; returns it as it is now."""
        begun, request = self._free(trajectory)
        generated = self._steps - begun
        context = request.context + generated
        return Request(trajectory, context, request.missing - generated, cached=context)

    def _mark(self, trajectory: int) -> float | None:
        running = self._running.get(trajectory)
        return None if running is None else running[0] + running[1].missing

    def _used(self) -> float:
        return self._held + self._steps * len(self._running)

    def _plan(self) -> None:
        """Wake up when the next request is done or the KV cache is full; a wake-up that comes too early does no harm,
        and one that was planned before is not repeated."""
        running = len(self._running)
        if not running:
            return
        while self._mark(self._marks[0][1]) != self._marks[0][0]:
            heapq.heappop(self._marks)
        steps = min(self._marks[0][0], (self._kv - self._held) / running) - self._steps
        now = self._environment.now
        due = max(now, self._stalled) + max(0.0, steps) * self._step[running]
        if due < self._due:
            self._due = due
            timeout = self._environment.timeout(due - now, due)
            assert timeout.callbacks is not None, "it has just been made"
            timeout.callbacks.append(self._wake)

    def _wake(self, event: simpy.Event) -> None:
        if event.value != self._due:
            return
        self._due = float("inf")
        self.advance()
        self._settle()
