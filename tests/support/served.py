"""Ledgers and storage units as processes of their own."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from headrace.dataplane.serve import serve_ledger, serve_unit
from headrace.wire import ipc_address
from headrace_storage.memory import MemoryStorage


@contextmanager
def a_ledger(directory: Path, name: str) -> Iterator[tuple[BaseProcess, str]]:
    """That is a storage unit too: the process, and its address."""
    address = ipc_address(str(directory), name)
    with _running((_whole, address)) as (process,):
        yield process, address


@contextmanager
def a_ledger_and_a_unit(directory: Path) -> Iterator[tuple[str, int]]:
    """Address of the one, and pid of the other."""
    address = ipc_address(str(directory), "ledger")
    with _running((_ledger, address), (_unit, ipc_address(str(directory), "unit"), address)) as (_, unit):
        yield address, unit.pid or 0


@contextmanager
def _running(*roles: tuple[Any, ...]) -> Iterator[list[BaseProcess]]:
    context = multiprocessing.get_context("forkserver")
    processes: list[BaseProcess] = [context.Process(target=run, args=given, daemon=True) for run, *given in roles]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _whole(address: str) -> None:
    asyncio.run(serve_ledger(address, MemoryStorage(None)))


def _ledger(address: str) -> None:
    asyncio.run(serve_ledger(address))


def _unit(address: str, to: str) -> None:
    asyncio.run(serve_unit(address, MemoryStorage(None), ledger=to))
