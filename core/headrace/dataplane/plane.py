"""The data plane from code without an event loop: partitions made and found, written to a file and brought back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.dataplane import snapshot
from headrace.dataplane.asking import as_path
from headrace.dataplane.connections import Connections
from headrace.dataplane.messages import PartitionSpec
from headrace.dataplane.partition_client import DEADLINE, Partition
from headrace.dataplane.schema import check_spec
from headrace.dataplane.sharded import ShardedPartition
from headrace.errors import ContractError
from headrace.wire import BlockingClient, check_deadline

SNAPSHOT_DEADLINE = 600.0


class DataPlane:
    """One thread's view, with the partitions that it gives: calls of two threads at once are refused. ``ledgers``:
    address of the ledger, or of all its shards in their order. ``connect``: a client of an address; closed with
    :meth:`close`."""

    def __init__(
        self, ledgers: str | Sequence[str], *, connect: Callable[[str], BlockingClient] = BlockingClient
    ) -> None:
        self._ledgers = [ledgers] if isinstance(ledgers, str) or not isinstance(ledgers, Sequence) else list(ledgers)
        if not self._ledgers or not all(isinstance(ledger, str) and ledger for ledger in self._ledgers):
            raise ContractError(
                f"a data plane whose ledger is {ledgers!r}", fix="name the address where one is served, or all of them"
            )
        self._connections = [Connections(ledger, connect) for ledger in self._ledgers]

    def create(self, spec: PartitionSpec) -> Partition:
        """Make a partition; one that is there already must be the same, else ContractError, as for what cannot be."""
        check_spec(spec)
        if not spec.consumers:
            raise ContractError(
                f"nobody reads partition {spec.name!r}", fix='name a consumer and what it reads: {"train": ("tokens",)}'
            )
        for connections in self._connections:
            connections.client().call("create", spec, deadline=DEADLINE, awaiting="a partition to be made")
        return self.partition(spec.name)

    def partition(self, name: str) -> Partition:
        """A partition that somebody made. ContractError when nobody did."""
        count = len(self._connections)
        shards = [Partition(shard, name, (place, count)) for place, shard in enumerate(self._connections)]
        return ShardedPartition(shards) if count > 1 else shards[0]

    def snapshot(self, path: str | Path, *, deadline: float = SNAPSHOT_DEADLINE) -> None:
        """Write what is here now to a file, which is whole or not there; see :mod:`headrace.dataplane.snapshot`.
        LostRowsError when a unit lost values meanwhile, RunError when the disk refuses it."""
        check_deadline(deadline)
        snapshot.take(as_path(path), self._ledgers, self.client, deadline=deadline)

    def restore(self, path: str | Path, *, deadline: float = SNAPSHOT_DEADLINE) -> None:
        """Bring the partitions of a snapshot back, to ledgers and units that were just started. ContractError where
        there are partitions already; RunError, and nothing done, when the file is not whole. When anything else fails,
        start ledgers and units anew."""
        check_deadline(deadline)
        snapshot.put_back(as_path(path), self._ledgers, self.client, deadline=deadline)

    def remove(self, name: str) -> None:
        """End a partition: its rows are gone, also those on lease, and consumers that wait for some hear ContractError.
        Another one may have its name then."""
        for connections in self._connections:
            connections.client().call("remove", name, deadline=DEADLINE, awaiting="a partition to be removed")

    def client(self, address: str = "") -> BlockingClient:
        """Of a unit or a ledger; of the first ledger when nothing is said."""
        return self._connections[0].client(address)

    def close(self) -> None:
        """Twice is fine. Leases that are held expire."""
        for connections in self._connections:
            connections.close()
