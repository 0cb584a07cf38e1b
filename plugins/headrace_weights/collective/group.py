"""Groups of torch.distributed without its default group, which may be an engine's own."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from headrace.contract import Array, TensorInfo, WeightManifest
from headrace_weights.tensors import places

dist: Any = importlib.import_module("torch.distributed")  # whose stubs lack most of what is used here

_SMALL = 1 << 20
"""Bytes of a tensor from which on it is sent by itself, without a copy."""
_LOOPBACK = "127.0.0.1"
_WORLD = "world"
_THREADS = 2
"""That carry one group's messages."""


class Meeting:
    """Where the members of groups find each other: a file in the run's private directory, or the publisher's port."""

    def __init__(self, address: str, *, serve: bool, seconds: float) -> None:
        """``address``: a path, or HOST:PORT; with ``serve``, HOST:0 for a port that the system chooses."""
        self._timeout = timedelta(seconds=seconds)
        host, _, port = address.rpartition(":")
        self._host = _LOOPBACK if address.startswith("/") else host
        if address.startswith("/"):
            self._store: Any = dist.FileStore(address)
            self.address = address
        else:
            self._store = dist.TCPStore(host, int(port), is_master=serve, wait_for_workers=False, timeout=self._timeout)
            self.address = f"{host}:{self._store.port}"

    def close_round(self, key: str, world: int) -> None:
        """Nobody joins the group ``key`` any more, which has ``world`` members."""
        dist.PrefixStore(key, self._store).set(_WORLD, str(world))

    def group(self, key: str, rank: int) -> Group:
        """As a member of it. RuntimeError when the others do not come in time."""
        store = dist.PrefixStore(key, self._store)
        store.wait([_WORLD], self._timeout)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = self._timeout
        options._threads = _THREADS
        return Group(dist.ProcessGroupGloo(store, rank, int(store.get(_WORLD)), options))


class Group:
    """The trainer, rank 0, and engines, for one version."""

    def __init__(self, members: Any) -> None:
        self._members = members

    def send(self, data: Array) -> Any:
        """Begin to bring rank 0's bytes to all others. Ends when the result's ``wait`` returns, or raises RuntimeError
        for a member that is gone."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return self._members.broadcast([torch.from_numpy(data)], options)


def parcels(manifest: WeightManifest, bucket_bytes: int) -> Iterator[tuple[int, int, list[tuple[int, TensorInfo]]]]:
    """What is sent together, the same for all members: where it begins and ends when all tensors lie one behind the
    other, and the tensors that it is made of, with their numbers. Large tensors are cut, small ones joined."""
    begin, end, joined = 0, 0, list[tuple[int, TensorInfo]]()
    for number, (info, start, stop) in enumerate(places(manifest)):
        large = stop - start >= _SMALL
        if joined and (large or stop - begin > bucket_bytes):
            yield begin, end, joined
            joined = []
        if large:
            for cut in range(start, stop, bucket_bytes):
                yield cut, min(cut + bucket_bytes, stop), [(number, info)]
        elif stop > start:
            begin = begin if joined else start
            joined, end = [*joined, (number, info)], stop
    if joined:
        yield begin, end, joined
