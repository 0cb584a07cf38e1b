"""Who waits for work, and who has which item.

Invariant: an item that was given away is held until it is reported, or until its worker is lost and somebody else gets
it. Nothing is held by two workers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from headrace.services.messages import ItemKey, WorkItem


class WorkBoard:
    """Workers are known by the id of their process, so that one which was started again is another one."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, asyncio.Future[WorkItem]]] = deque()
        self._queue: deque[WorkItem] = deque()
        self._held: dict[str, dict[ItemKey, WorkItem]] = {}
        self._holder: dict[ItemKey, str] = {}
        self._lost: set[str] = set()

    def wait(self, worker: str) -> asyncio.Future[WorkItem]:
        """A worker's place in the line; cancel it to give the place up. One that is lost has none: its request was on
        the way when it died, and nobody would play what it was given."""
        waiting: asyncio.Future[WorkItem] = asyncio.get_running_loop().create_future()
        if self.is_lost(worker):
            waiting.cancel()
        else:
            self._waiting.append((worker, waiting))
        return waiting

    def put(self, item: WorkItem) -> None:
        """Queue an item before those that are made on demand."""
        self._queue.append(item)

    def give(self, make: Callable[[], WorkItem | None]) -> None:
        """Hand items to those who wait: the queued ones, then what ``make`` makes until it has no more."""
        while self._waiting:
            worker, waiting = self._waiting[0]
            if waiting.done():
                self._waiting.popleft()
                continue
            item = self._queue.popleft() if self._queue else make()
            if item is None:
                return
            self._waiting.popleft()
            self._held.setdefault(worker, {})[item.key] = item
            self._holder[item.key] = worker
            waiting.set_result(item)

    def done(self, key: ItemKey) -> WorkItem | None:
        """An item was reported; the item, or None when nobody held it any more."""
        worker = self._holder.pop(key, None)
        return None if worker is None else self._held[worker].pop(key)

    def forget(self, keys: Iterable[ItemKey]) -> None:
        """Nobody wants these items any more, whether they are queued or held."""
        forgotten = set(keys)
        self._queue = deque(item for item in self._queue if item.key not in forgotten)
        for key in forgotten:
            self.done(key)

    def is_lost(self, worker: str) -> bool:
        """Whether what this worker still says comes too late."""
        return worker in self._lost

    def lost(self, worker: str) -> list[WorkItem]:
        """A worker is gone. Returns the items it held, which nobody holds now."""
        self._lost.add(worker)
        for who, waiting in self._waiting:
            if who == worker:
                waiting.cancel()
        items = list(self._held.pop(worker, {}).values())
        for item in items:
            del self._holder[item.key]
        return items
