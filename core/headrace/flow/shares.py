"""Batches that data-parallel ranks share: cut once, and the same for whoever asks, in whatever order.

A consumer's batches are numbered from 0 on. The first request for a batch takes whole groups on one lease and cuts them
into a share for every rank, equal in number but for one group and close in tokens (:mod:`headrace.balance`);
every later request for a share of it, by any process of any rank, is answered with what was cut then.

Invariants: a batch is acknowledged when every rank has acknowledged it, and not before. It is given back as a whole,
and every later one with it: when one rank releases it, or when a rank that was heard of and has not acknowledged it
says nothing for as long as it said it would hold on. From then on batches are cut anew, in their order, for ranks that
begin anew; one that only goes on gets none of them, since it was not given the first. A rank that was not heard of
since then ends no lease: it may not have started yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Generic, TypeVar

from headrace.balance import balanced_shares
from headrace.contract import Array
from headrace.flow.leases import Lease
from headrace.flow.ledger import Ledger

T = TypeVar("T")

_REMEMBERED = 4096
"""Leases of acknowledged batches: of several processes of a rank, the later ones acknowledge what has left by then."""


@dataclass(slots=True, eq=False)
class _Cut(Generic[T]):
    lease: int
    answers: tuple[T, ...]
    """By rank."""
    until: float
    """When it is given back."""
    missing: set[int]
    """Ranks that have not acknowledged it."""
    given: set[int] = field(default_factory=set)
    """Ranks that have asked for their share."""


class Shares(Generic[T]):
    """Batches of ``consumer``. ``answer``: what a rank is told of its share, which is said once; it gets the groups of
    the share as a lease, and how many groups the batch has. ``first``: the number of the first batch."""

    def __init__(
        self, ledger: Ledger, consumer: str, ranks: int, *, answer: Callable[[Lease, int], T], first: int = 0
    ) -> None:
        self.ranks = ranks
        self._ledger = ledger
        self._consumer = consumer
        self._answer = answer
        self._next = first
        """The batch to be cut next."""
        self._cuts: dict[int, _Cut[T]] = {}
        """By number, ascending."""
        self._until: dict[int, float] = {}
        """Until when each rank that was heard of may be silent."""
        self._acknowledged: dict[int, None] = {}
        """Leases, the latest last."""

    def at_least(self, groups: int, at_least: int) -> int:
        """How many of ``groups`` must be ready so that each rank gets one of this batch and, if some are left, of the
        next."""
        return groups if groups < 2 * self.ranks else max(at_least, self.ranks)

    @property
    def first(self) -> int:
        """The first batch that not every rank has acknowledged."""
        return next(iter(self._held()), self._next)

    @property
    def held(self) -> bool:
        """Whether a batch is on lease."""
        return bool(self._held())

    def is_over(self, batch: int) -> bool:
        """Whether every rank has acknowledged it."""
        return batch not in self._held() and batch < self._next

    def is_cut(self, batch: int) -> bool:
        """Whether it is on lease: there are shares of it to be had."""
        return batch in self._held()

    def skipped(self, batch: int, rank: int) -> int | None:
        """The first batch that a rank must ask for before this one, because it was not given it, or what it was given
        of it before was given back."""
        held = self._held()
        skipped = (number for number, cut in held.items() if number < batch and rank not in cut.given)
        return next(skipped, self._next if batch > self._next else None)

    def share(self, batch: int, rank: int, *, now: float, seconds: float) -> T:
        """Of a batch that is cut."""
        cut = self._held()[batch]
        cut.given.add(rank)
        self._hear(rank, now + seconds)
        return cut.answers[rank]

    def cut(
        self,
        *,
        groups: int,
        at_least: int,
        now: float,
        seconds: float,
        token_budget: int | None = None,
        min_version: int | None = None,
    ) -> bool:
        """Cut the next batch, of up to ``groups`` groups, if so many are ready as :meth:`at_least` says.
        ``token_budget``: of one rank; passed only by a group that does so alone, or where a rank would be left without
        a group."""
        held = self._held()
        lease = self._ledger.lease(
            self._consumer,
            groups,
            deadline=now + seconds,
            at_least=self.at_least(groups, at_least),
            token_budget=token_budget,
            min_version=min_version,
            ranks=self.ranks,
        )
        if lease is None:
            return False
        answers = tuple(self._answer(replace(lease, groups=share), len(lease.groups)) for share in self._divide(lease))
        held[self._next] = _Cut(lease.lease, answers, lease.deadline, set(range(self.ranks)))
        self._next += 1
        # A rank that was heard of long ago may just have had nothing to ask for.
        self._until = {rank: max(until, now + seconds) for rank, until in self._until.items()}
        self._hold()
        return True

    def _divide(self, lease: Lease) -> list[Array]:
        tokens = self._ledger.group_tokens(lease.groups)
        return [lease.groups[places] for places in balanced_shares(tokens, self.ranks)]

    def acknowledge(self, lease: int, rank: int) -> tuple[Lease, Array] | None:
        """A rank is done with its share; what :meth:`Ledger.acknowledge` returns when it was the last one. Any process
        of the rank may say so, and again. ValueError when the batch was given back before."""
        if lease in self._acknowledged:
            return None
        batch = self._number(lease)
        cut = self._cuts[batch]
        cut.missing.discard(rank)
        if cut.missing:
            self._hold()
            return None
        del self._cuts[batch]
        self._acknowledged[lease] = None
        if len(self._acknowledged) > _REMEMBERED:
            del self._acknowledged[next(iter(self._acknowledged))]
        return self._ledger.acknowledge(lease)

    def extend(self, lease: int, rank: int, *, until: float) -> None:
        """A rank is there, and holds on until then to all it has not acknowledged. ValueError when this batch was
        given back."""
        if lease not in self._acknowledged:
            self._number(lease)
        self._hear(rank, until)

    def release(self, lease: int) -> tuple[Lease, ...]:
        """Give a batch back, and all that are later. Returns the leases that this ended. ValueError when it was given
        back, or acknowledged, before."""
        batch = self._number(lease)
        ended = [cut.lease for number, cut in self._cuts.items() if number >= batch]
        return tuple(self._ledger.release(each) for each in reversed(ended))  # what is given back last comes first

    def _number(self, lease: int) -> int:
        for batch, cut in self._held().items():
            if cut.lease == lease:
                return batch
        raise ValueError(f"lease {lease} is not held: a rank released its batch, or was silent for too long")

    def _held(self) -> dict[int, _Cut[T]]:
        """By number. From the first that was given back meanwhile, numbers are cut anew, for ranks that begin anew."""
        back = next((number for number, cut in self._cuts.items() if cut.lease not in self._ledger.leases), None)
        if back is not None:
            self._next = back
            self._cuts = {number: cut for number, cut in self._cuts.items() if number < back}
            self._until.clear()
        return self._cuts

    def _hear(self, rank: int, until: float) -> None:
        self._until[rank] = max(until, self._until.get(rank, until))
        self._hold()

    def _hold(self) -> None:
        """Each batch as long as every rank does that is not done with it, and no longer than those before it."""
        end = inf
        for cut in self._cuts.values():
            due = (self._until[rank] for rank in cut.missing if rank in self._until)
            end = min(end, min(due, default=cut.until))
            if cut.until != end:
                self._ledger.extend(cut.lease, deadline=end)
                cut.until = end
