"""The ranks' process group, and how they agree.

Invariant: what may fail on one rank alone is done inside :func:`agreed`, so that no rank waits in a collective for one
that has given up.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # it is there, and in the documents

from headrace.errors import EngineError

T = TypeVar("T")


class RefusedOrderError(Exception):
    """All ranks left an order in step, because it failed on one of them: on this one, when there is a cause."""


def join(rendezvous: str, *, rank: int, ranks: int, device: str, seconds: float) -> None:
    """Meet the other ranks of this machine at a file. EngineError when this process is in such a group already.
    ``seconds``: that a collective may take."""
    if dist.is_initialized():
        raise EngineError(
            "this process is in a process group of torch.distributed already, and can be in one only",
            fix="close the other engine first, or give each a node of its own",
        )
    if device == "cuda":
        torch.cuda.set_device(rank)
    with _this_machine_only():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=FileStore(rendezvous, ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=seconds),
            device_id=torch.device(device, rank) if device == "cuda" else None,
        )


def leave() -> None:
    """Of a group that lost a rank too."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _this_machine_only() -> Iterator[None]:
    """Sockets that are opened meanwhile listen on the loopback interface, unless somebody chose another."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    names = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ and loopback]
    os.environ.update({name: str(loopback) for name in names})
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def total(*values: float) -> list[float]:
    """Sums over all ranks, the same bits on each."""
    sums = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    found: list[float] = sums.tolist()
    return found


def agreed(work: Callable[[], T]) -> T:
    """What ``work``, which uses no collective, gives here. RefusedOrderError when it raises on any rank."""
    failure: Exception | None = None
    try:
        value = work()
    except Exception as error:  # a loss is a plugin's and may raise anything; raised again, in step
        failure = error
    if total(failure is not None) != [0.0]:
        raise RefusedOrderError from failure
    return value
