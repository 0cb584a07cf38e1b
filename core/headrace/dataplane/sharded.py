"""A partition whose groups several ledgers own, as one thread sees it.

A lease looks first: every shard says how many groups of each version are ready, and when there are too few the caller
waits at all shards for more, holding nothing. Then it takes its share of each. Order: no group is leased while one of
an older version is ready that was so when the lease looked, at whatever shard; of one version, shards give equal
shares, each those that were ready there first. What others take between the two is made up for by the same shard's
next, and when that leaves too few, all is given back and looked for again. A lease has rows of one shard after
another's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TypeVar

import msgspec
import numpy as np

from headrace.contract import Array, Batch, StorageStats
from headrace.dataplane.asking import as_ids, check_columns
from headrace.dataplane.contents import Value, batch_of, values_of
from headrace.dataplane.messages import LeaseCall, LookCall, Noted, PartitionStats, Ready, StatsCall
from headrace.dataplane.ordering import Order
from headrace.dataplane.partition_client import DEADLINE, GRACE, LEASE_SECONDS, Partition
from headrace.dataplane.refusals import too_few
from headrace.dataplane.rows import Rows, check_kind
from headrace.dataplane.shards import SHARD_BITS, made_of, oldest_shares, shards_of
from headrace.errors import ContractError, DeadlineError, HeadraceError, LostRowsError, RunError, SilenceError
from headrace.wire import BlockingClient, Sent, first_answered

T = TypeVar("T")


class ShardedPartition(Partition):
    """``shards``: the same partition at each ledger."""

    def __init__(self, shards: Sequence[Partition]) -> None:
        self._shards = shards
        self._home = shards[0]
        """What puts."""
        whole = made_of([shard._made for shard in shards])
        for shard in shards:
            shard._made_at_units = whole
        self.name = self._home.name
        self.spec = self._home.spec
        self._made = 0
        """Each shard says its own."""
        self._turns = itertools.count()

    @property
    def moves(self) -> int:
        return self._home.moves

    def try_put(
        self,
        columns: Mapping[str, Value],
        *,
        rows: Array | Sequence[int] | None = None,
        version: int = 0,
        once: str = "",
        deadline: float = DEADLINE,
    ) -> Noted:
        """As of a partition with one ledger; when rows of several shards are put and one fails, others may be there."""
        check_columns(columns)
        rows = None if rows is None else as_ids(rows, "rows of a put")
        if rows is None or rows.ndim != 1 or rows.dtype != np.int64:  # which the unit says more about
            return self._home.try_put(columns, rows=rows, version=version, once=once, deadline=deadline)
        whose = rows >> SHARD_BITS
        if not len(rows) or (whose == whose[0]).all() or any(len(column) != len(rows) for column in columns.values()):
            return self._home.try_put(columns, rows=rows, version=version, once=once, deadline=deadline)
        refused, batch = np.zeros(len(rows), np.int8), batch_of(rows, columns)
        for shard in np.unique(whose).tolist():
            at = np.flatnonzero(whose == shard)
            part = batch.take(at)
            noted = self._home.try_put(values_of(part), rows=part.rows, version=version, deadline=deadline)
            if noted.refused is not None:
                refused[at] = noted.refused
        return Noted(refused=refused if refused.any() else None)

    # ------------------------------------------------------------ leases

    def _obtain_in_order(self, call: LeaseCall, order: Order) -> tuple[Rows, Batch | None]:
        raise ContractError(
            "a consumer cannot have an order of its own in a data plane with several ledgers",
            fix="start one ledger, or take groups in the ledgers' order",
        )

    def _obtain(self, call: LeaseCall) -> tuple[Rows, Batch | None]:
        if call.share is not None:
            raise _one_ledger()
        end = monotonic() + call.wait
        while True:
            ready = self._look(call, end)
            held = self._take(call, ready)
            if held is not None:
                return held, None

    def _look(self, call: LeaseCall, end: float) -> list[dict[int, int]]:
        """What is ready at each shard, as soon as it is enough in all."""
        while True:
            looks = [LookCall(call, 0, 0.0)] * len(self._shards)
            ready = [found.groups for found in self._ask_all("look", looks, Ready)]
            there = [sum(found.values()) for found in ready]
            missing = call.at_least - sum(there)
            if missing <= 0:
                return ready
            # When there is enough in all, one shard has as many more as is its share of what is missing.
            more = -(-missing // len(self._shards))
            wait = max(0.0, end - monotonic())
            looks = [LookCall(call, count + more, wait) for count in there]
            try:
                self._ask_any("look", looks, Ready, wait)
            except SilenceError:
                raise
            except DeadlineError as error:  # of a shard, which knows its own groups only
                raise too_few(call, sum(there)) from error

    def _take(self, call: LeaseCall, ready: list[dict[int, int]]) -> Rows | None:
        """None when others were faster, and too little was left."""
        shares = oldest_shares(ready, call.groups, first=next(self._turns) % len(self._shards))
        if not call.token_budget:
            # All take from shards in one order, so that of two who are in each other's way one wins.
            shares = [(shard, sum(n for whose, n in shares if whose == shard)) for shard in sorted(dict(shares))]
        held: list[Rows] = []
        try:
            enough = self._take_shares(call, shares, held)
        except BaseException:  # nobody else could know of the leases; raised again
            self._give_back(held)
            raise
        if enough:
            return _joined(held)
        self._give_back(held)
        return None

    def _take_shares(self, call: LeaseCall, shares: list[tuple[int, int]], held: list[Rows]) -> bool:
        """Whether there was enough."""
        got, rest, budget = 0, sum(share for _, share in shares), call.token_budget
        for shard, share in shares:
            rest -= share
            needed = 1 if budget else max(1, call.at_least - got - rest)
            part = msgspec.structs.replace(
                call,
                groups=share,
                at_least=needed,
                wait=0.0,
                token_budget=budget,
                strict=bool(held),
                columns=(),
                made=self._shards[shard]._made,
            )
            try:
                rows, _ = self._shards[shard]._obtain(part)
            except DeadlineError:  # others were faster
                if budget or got + rest < call.at_least:
                    break
                continue
            held.append(rows)
            got += rows.groups
            if budget:
                budget -= int(rows.tokens.sum())
                if rows.groups < share or budget <= 0:
                    break
        return got >= (1 if call.token_budget else call.at_least)

    def _give_back(self, held: Sequence[Rows]) -> None:
        for rows in reversed(held):
            with suppress(HeadraceError):  # it expires
                self._of(rows).release(rows)

    def get(self, held: Rows, columns: Sequence[str] | None = None, *, deadline: float = DEADLINE) -> Batch:
        found = [self._of(part).get(part, columns, deadline=deadline) for part in _parts(held)]
        return found[0] if len(found) == 1 else Batch.concatenate(found)

    def acknowledge(self, held: Rows, *, deadline: float = DEADLINE) -> None:
        """The consumer is done with the rows. RunError, and nothing acknowledged, when the lease ended before at any
        shard; LostRowsError, and the lease ended at all of them, when a unit has lost some of the rows."""
        parts = _parts(held)
        if len(parts) > 1:
            try:
                self.extend(held, GRACE, deadline=deadline)
            except LostRowsError:
                self._give_back(parts)
                raise
        for part in parts:
            self._of(part).acknowledge(part, deadline=deadline)

    def release(self, held: Rows, *, deadline: float = DEADLINE) -> None:
        ended: RunError | None = None
        for part in _parts(held):
            try:
                self._of(part).release(part, deadline=deadline)
            except RunError as error:  # raised when the others are given back
                ended = error
        if ended is not None:
            raise ended

    def extend(self, held: Rows, seconds: float = LEASE_SECONDS, *, deadline: float = DEADLINE) -> None:
        for part in _parts(held):
            self._of(part).extend(part, seconds, deadline=deadline)

    def first_batch(self, consumer: str, *, deadline: float = DEADLINE) -> int:
        raise _one_ledger()

    def _of(self, rows: Rows) -> Partition:
        return self._shards[rows.lease >> SHARD_BITS]

    # ------------------------------------------------------------ groups and figures

    def drop(self, groups: Sequence[int], *, deadline: float = DEADLINE) -> None:
        given = as_ids(groups, "groups")
        if given.ndim != 1 or given.dtype.kind != "i":  # which a ledger says more about
            self._home.drop(groups, deadline=deadline)
            return
        whose = shards_of(given, self.spec.group_size)
        for shard, partition in enumerate(self._shards):
            if (whose == shard).any():
                partition.drop(given[whose == shard].tolist(), deadline=deadline)

    def lost(self, *, wait: float = 0.0, deadline: float = DEADLINE) -> list[int]:
        lost = [group for shard in self._shards for group in shard.lost(deadline=deadline)]
        if lost or not wait:
            return lost
        calls = [shard.lost_call(wait) for shard in self._shards]
        if self._ask_any("lost", calls, list[int], wait):
            return self.lost(deadline=deadline)
        return []

    def stats(self, *, deadline: float = DEADLINE) -> PartitionStats:
        """A call that waits for a lease waits at all shards, and is counted once."""
        calls = [StatsCall(self.name, shard._made) for shard in self._shards]
        found = self._ask_all("stats", calls, PartitionStats, deadline)
        consumers = list(self.spec.consumers)
        return PartitionStats(
            rows=sum(stats.rows for stats in found),
            nbytes=sum(stats.nbytes for stats in found),
            leases=sum(stats.leases for stats in found),
            ready={name: sum(stats.ready[name] for stats in found) for name in consumers},
            waiting={name: max(stats.waiting[name] for stats in found) for name in consumers},
        )

    def unit_stats(self, *, deadline: float = DEADLINE) -> list[StorageStats]:
        return self._home.unit_stats(deadline=deadline)

    # ------------------------------------------------------------ all shards at once

    def _ask_all(self, method: str, requests: Sequence[object], reply: type[T], deadline: float = DEADLINE) -> list[T]:
        with self._sent(method, requests, deadline, "a shard of the ledger") as calls:
            found = []
            while calls:
                client, call = calls.pop(0)
                found.append(client.receive(call, reply))
            return found

    def _ask_any(self, method: str, requests: Sequence[object], reply: type[T], wait: float) -> T:
        """The answer of the first that has one; the others are told that nobody waits any more."""
        with self._sent(method, requests, wait + GRACE, "one of the ledger's shards") as calls:
            client, call = calls.pop(first_answered(calls))
            return client.receive(call, reply)

    @contextmanager
    def _sent(
        self, method: str, requests: Sequence[object], deadline: float, awaiting: str
    ) -> Iterator[list[tuple[BlockingClient, Sent]]]:
        """Calls under way, one to each shard; those that are left at the end are cancelled."""
        calls: list[tuple[BlockingClient, Sent]] = []
        try:
            for shard, request in zip(self._shards, requests, strict=True):
                client = shard.ledger
                calls.append((client, client.send(method, request, deadline=deadline, awaiting=awaiting)))
            yield calls
        finally:
            for client, call in calls:
                client.cancel(call)


def _parts(held: Rows) -> tuple[Rows, ...]:
    check_kind(held)
    return held.parts or (held,)


def _joined(held: Sequence[Rows]) -> Rows:
    """Leases of shards as one, which is known by the first."""
    if len(held) == 1:
        return held[0]
    rows, tokens, attempts = (
        np.concatenate([getattr(part, name) for part in held]) for name in ("rows", "tokens", "attempts")
    )
    groups = sum(part.groups for part in held)
    return msgspec.structs.replace(
        held[0], rows=rows, tokens=tokens, attempts=attempts, groups=groups, parts=tuple(held)
    )


def _one_ledger() -> ContractError:
    return ContractError(
        "ranks cannot share batches of a data plane with several ledgers",
        fix="start one ledger, or let each rank lease for itself",
    )
