"""How many rollout instances there should be, from how busy those are that there are.

The rules are those that Relax documents for its elastic rollout. More, if *any* of these has held for its time: KV
memory is nearly full, requests wait for slots in numbers, they wait for long. Fewer, one at a time, only if *all* has
been calm for its time, and if those that remain would still be. After a change nothing is changed until it can show.
What somebody did not say resets the clocks of the rules that need it: an unknown load is neither high nor low.

Relax's other two signals, time to first token and variance of throughput, are not used: instances do not tell them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

KV_HIGH, KV_HIGH_SECONDS = 0.85, 30.0
QUEUE_LONG, QUEUE_LONG_SECONDS = 10, 20.0
"""Requests that wait, per instance."""
WAIT_LONG, WAIT_LONG_SECONDS = 5.0, 15.0
"""Seconds that they wait."""
KV_LOW, CALM_SECONDS = 0.3, 120.0
KV_PROJECTED = 0.5
"""Of those that remain when one leaves: below it one may."""
AT_ONCE = 4
"""Instances that join together, at most."""
REST_BEFORE_MORE, REST_BEFORE_FEWER = 60.0, 300.0
"""Seconds after a change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Of all instances at one moment. None: not known."""

    kv_used: float | None
    """Share of their KV memory in use, on average."""
    waiting: int | None
    """Requests that wait for a slot, in all."""
    wait_seconds: float | None
    """For how long."""


class _Held:
    """For how long a condition has held without a break."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None

    def __call__(self, holds: bool, now: float) -> bool:
        """Whether it has held for its time."""
        if not holds:
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now - self._since >= self._seconds


class Autoscaler:
    """Keeps between ``least`` and ``most`` instances. Asked again and again, with times of a clock that only rises."""

    def __init__(self, *, least: int, most: int) -> None:
        if not 1 <= least <= most:
            raise ValueError(f"least = {least} is at least 1 and at most most = {most}")
        self._least, self._most = least, most
        self._full = _Held(KV_HIGH_SECONDS)
        self._queued = _Held(QUEUE_LONG_SECONDS)
        self._slow = _Held(WAIT_LONG_SECONDS)
        self._calm = _Held(CALM_SECONDS)
        self._changed = -math.inf

    def target(self, load: Load, *, instances: int, now: float) -> int:
        """How many there should be, of ``instances`` that there are or that are under way."""
        target = max(self._least, min(self._most, self._wanted(load, instances, now)))
        if target != instances:
            self._changed = now
        return target

    def _wanted(self, load: Load, instances: int, now: float) -> int:
        kv, waiting, wait = load.kv_used, load.waiting, load.wait_seconds
        full = self._full(kv is not None and kv > KV_HIGH, now)
        queued = self._queued(waiting is not None and waiting > QUEUE_LONG * instances, now)
        slow = self._slow(wait is not None and wait > WAIT_LONG, now)
        calm = self._calm(kv is not None and kv < KV_LOW and waiting == 0, now)
        rest = now - self._changed
        if (full or queued or slow) and rest >= REST_BEFORE_MORE:
            return instances + _more(load, instances)
        if calm and rest >= REST_BEFORE_FEWER and instances > 1 and _projected(load, instances) < KV_PROJECTED:
            return instances - 1
        return instances


def _more(load: Load, instances: int) -> int:
    """As many as would bring KV memory and queue to their marks."""
    for_kv = math.ceil(instances * (load.kv_used or 0.0) / KV_HIGH) - instances
    for_queue = math.ceil((load.waiting or 0) / QUEUE_LONG) - instances
    return max(1, min(AT_ONCE, max(for_kv, for_queue)))


def _projected(load: Load, instances: int) -> float:
    assert load.kv_used is not None, "only a known load is calm"
    return load.kv_used * instances / (instances - 1)
