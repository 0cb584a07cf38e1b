"""Consumers and producers of a data plane as processes of their own."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from headrace.dataplane import DataPlane
from headrace.errors import DeadlineError


def processes(count: int) -> ProcessPoolExecutor:
    """Forked from a clean process, since this one may have threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headrace.dataplane"])
    return ProcessPoolExecutor(count, mp_context=context)


def consume_all(ledger: str, consumer: str, end: Path) -> list[tuple[int, tuple[str, ...], int]]:
    """Until nothing is left and ``end`` is there: row, columns that came with it, and what its ``number`` was."""
    plane = DataPlane(ledger)
    partition, found = plane.partition("phase"), list[tuple[int, tuple[str, ...], int]]()
    while True:
        ended = end.exists()
        try:
            held, batch = partition.take(consumer, 7, at_least=1, deadline=0.2)
        except DeadlineError:
            if ended:
                break
            continue
        columns = tuple(sorted(batch.columns))
        numbers = batch.dense("number").tolist()
        partition.acknowledge(held)
        found += [(row, columns, number) for row, number in zip(batch.rows.tolist(), numbers, strict=True)]
    plane.close()
    return found
