"""Groups of torch.distributed without its default group, which may be an engine's own."""

from __future__ import annotations

import importlib
import time
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
_GROUP = "group"
_LOOK_SECONDS = 0.001
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

        self._group: Group | None = None

    @property
    def group_key(self) -> str:
        """Of the group that this member was in last, and could be in again; empty: of none."""
        return "" if self._group is None else self._group.key

    def close_round(self, key: str, *, group_key: str, world: int) -> None:
        """Nobody joins the round ``key`` any more: it is for the group ``group_key``, which is made in that round or
        there already, and has ``world`` members."""
        dist.PrefixStore(key, self._store).set(_GROUP, f"{group_key} {world}")

    def group(self, key: str, rank: int) -> Group:
        """That of the round ``key``; ``rank``: for one that is made in it. RuntimeError when the others do not come in
        time, or this member has left that group."""
        store = dist.PrefixStore(key, self._store)
        end = time.monotonic() + self._timeout.total_seconds()
        while not store.check([_GROUP]):  # waiting in the store is slow: it looks every ten milliseconds
            if time.monotonic() > end:
                raise RuntimeError("nobody closed the round")
            time.sleep(_LOOK_SECONDS)
        group_key, world = store.get(_GROUP).decode().split()
        if self._group is not None and self._group.key == group_key:
            return self._group
        if group_key != key:
            raise RuntimeError("this member has left the round's group")
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = self._timeout
        options._threads = _THREADS
        self._group = Group(key, dist.ProcessGroupGloo(store, rank, int(world), options))
        return self._group

    def leave(self) -> None:
        """The group is broken, or of no use any more."""
        self._group = None


class Group:
    """The trainer, rank 0, and engines."""

    def __init__(self, key: str, members: Any) -> None:
        self.key = key
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
