"""How every side of the data plane's benchmark is timed; the standard library alone, since a side may lack the rest."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable


def rate(amount: float, repeat: int, work: Callable[[], object]) -> float:
    """Of ``work`` done ``repeat`` times."""
    started = time.perf_counter()
    for _ in range(repeat):
        work()
    return amount * repeat / (time.perf_counter() - started)


def latency(put: Callable[[], object], take: Callable[[], object], repeat: int) -> float:
    """Median seconds from a put to the moment when a consumer that waits in another thread has the row."""
    arrived, ready, took = threading.Semaphore(0), threading.Semaphore(0), []

    def consume() -> None:
        for _ in range(repeat):
            ready.release()
            take()
            took.append(time.perf_counter())
            arrived.release()

    thread = threading.Thread(target=consume)
    thread.start()
    began = []
    for _ in range(repeat):
        ready.acquire()
        time.sleep(0.005)  # the consumer is waiting by then
        began.append(time.perf_counter())
        put()
        arrived.acquire()
    thread.join()
    return statistics.median(end - start for start, end in zip(began, took, strict=True))


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
