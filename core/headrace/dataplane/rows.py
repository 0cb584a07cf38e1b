"""What a consumer has on lease, as it knows it."""

from __future__ import annotations

import msgspec

from headrace.contract import Array
from headrace.dataplane.messages import Holder, LeaseRef, Share
from headrace.errors import ContractError


class Rows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """On lease. ``rows``: int64 [n], the oldest version first, whole groups unless the consumer works by row;
    ``tokens``: int64 [n]; ``attempts``: int64 [n], how often each was leased by this consumer, this time included."""

    partition: str
    lease: int
    consumer: str
    rows: Array
    tokens: Array
    attempts: Array
    unit: int
    """That has every column the consumer reads of every row; 0: ``units``, int16 [n, columns], says who has which."""
    units: Array | None
    groups: int
    """Of the lease: of all ranks, where they share it; the number of rows, where the consumer works by row."""
    share: Share | None
    """Of which batch the rows are which rank's."""
    parts: tuple[Rows, ...] = ()
    """Where shards of the ledger gave them: what each did."""

    def __len__(self) -> int:
        return len(self.rows)


def lease_ref(partition: str, held: Rows, seconds: float = 0.0) -> LeaseRef:
    """The lease, as the ledger is told of it."""
    check_rows(held, partition)
    holder = None if held.share is None else Holder(held.consumer, held.share.rank)
    return LeaseRef(partition, held.lease, seconds, holder)


def check_rows(held: Rows, partition: str) -> None:
    """ContractError for what is no lease of the partition."""
    check_kind(held)
    if held.partition != partition:
        raise ContractError(
            f"a lease of partition {held.partition!r} was given to partition {partition!r}",
            fix="give it to the partition that it is of",
        )


def check_kind(held: Rows) -> None:
    """ContractError for what is no lease."""
    if not isinstance(held, Rows):
        raise ContractError(f"{type(held).__name__} in the place of a lease", fix="pass on the Rows of lease or take")
