"""Calls of consumers that wait until there is enough for them."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from headrace.dataplane.messages import LeaseCall, LookCall
from headrace.dataplane.refusals import too_few
from headrace.wire import Promise

_Call = LeaseCall | LookCall
_Kind = tuple[int | None, ...]
_Waiter = tuple[int, int, Any, asyncio.Future[Any], float]
_SPARE = 64
"""Calls that gave up which are always borne with."""


class Waiting:
    """Calls of one consumer, smallest first. One that cannot be served holds up those that ask for as much or more and
    are as particular about versions, or ask for the same shared batch, and no others; one that has chosen holds up
    none."""

    def __init__(self, ready: Callable[[str], Mapping[int, int]]) -> None:
        """``ready``: groups that a consumer could lease, by version."""
        self._ready = ready
        self._heaps: dict[_Kind, list[_Waiter]] = {}
        """What the first of a heap cannot have, none of the heap can."""
        self._order = 0
        self._kept = self._waiting = 0
        """Calls in heaps, and those of them that did not give up."""

    def __len__(self) -> int:
        return self._waiting

    def add(self, call: _Call) -> asyncio.Future[Any]:
        future: Promise[Any] = Promise()
        heapq.heappush(self._heaps.setdefault(_kind(call), []), (call.at_least, self._order, call, future, monotonic()))
        self._order += 1
        self._kept += 1
        self._waiting += 1
        timer = asyncio.get_running_loop().call_later(call.wait, _give_up, future, call, self._ready)
        future.add_done_callback(lambda _: self._ended(timer))
        return future

    def longest(self, now: float) -> float:
        """For how many seconds the one that waits longest has; 0 when none does. O(waiting)."""
        since = [waiter[4] for heap in self._heaps.values() for waiter in heap if not waiter[3].done()]
        return now - min(since, default=now)

    def end(self, error: Exception) -> None:
        """None of them will be answered."""
        for heap in self._heaps.values():
            for _, _, _, future, _ in heap:
                if not future.done():
                    future.set_exception(error)
        self._heaps.clear()
        self._kept = 0

    def _ended(self, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        self._waiting -= 1
        if self._kept > 2 * self._waiting + _SPARE:
            self._forget()

    def _forget(self) -> None:
        """Calls that gave up behind one that still waits."""
        left = {kind: [w for w in heap if not w[3].done()] for kind, heap in self._heaps.items()}
        self._heaps = {kind: heap for kind, heap in left.items() if heap}
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._kept = sum(map(len, self._heaps.values()))

    def serve(self, grant: Callable[[Any], object | None]) -> None:
        """Answer those that can be. O(answered · log waiting + different kinds)."""
        firsts = [(*heap[0][:2], kind) for kind, heap in self._heaps.items()]
        heapq.heapify(firsts)
        while firsts:
            _, _, kind = heapq.heappop(firsts)
            heap = self._heaps[kind]
            _, _, call, future, _ = heap[0]
            if not future.done():
                granted = grant(call)
                if granted is None:
                    continue
                future.set_result(granted)
            heapq.heappop(heap)
            self._kept -= 1
            if heap:
                heapq.heappush(firsts, (*heap[0][:2], kind))
            else:
                del self._heaps[kind]


def _kind(call: _Call) -> _Kind:
    if isinstance(call, LookCall):
        return call.lease.min_version, call.after
    if call.chosen is not None:
        return ()
    return (call.min_version, -1) if call.share is None else (0, call.share.batch)


def _give_up(future: asyncio.Future[Any], call: _Call, ready: Callable[[str], Mapping[int, int]]) -> None:
    if not future.done():
        lease = call.lease if isinstance(call, LookCall) else call
        wanted = " that its order wants" if isinstance(call, LookCall) and call.after else ""
        there = ready(lease.consumer).items()
        count = sum(groups for version, groups in there if version >= lease.min_version)
        future.set_exception(too_few(lease, count, of=wanted))
