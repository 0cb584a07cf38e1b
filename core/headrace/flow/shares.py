"""Batches that data-parallel ranks share: cut once, and the same for whoever asks, in whatever order.

A consumer's batches are numbered from 0 on. The first request for a batch takes whole groups on one lease and cuts them
into a share for every rank, equal in number but for one group and close in tokens (:mod:`headrace.flow.balance`);
every later request for a share of it, by any process of any rank, is answered with what was cut then.

Invariants: a batch is acknowledged when every rank has acknowledged it, and not before. It is given back as a whole:
when one rank releases it, or when a rank that was heard of and has not acknowledged it says nothing for as long as it
said it would hold on; its number is then cut anew for whoever asks. A rank that was never heard of ends no lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from headrace.contract import Array
from headrace.flow.balance import balanced_shares
from headrace.flow.leases import Lease
from headrace.flow.ledger import Ledger

T = TypeVar("T")

_REMEMBERED = 4096
"""Leases of acknowledged batches: of several processes of a rank, the later ones acknowledge what has left by then."""


@dataclass(frozen=True, slots=True, eq=False)
class _Cut(Generic[T]):
    lease: int
    answers: tuple[T, ...]
    """By rank."""
    missing: set[int]
    """Ranks that have not acknowledged it."""
    heard: set[int]
    """Ranks whose silence ends it."""


class Shares(Generic[T]):
    """Batches of ``consumer``. ``answer``: what a rank is told of its share, which is said once; it gets the groups of
    the share as a lease, and how many groups the batch has. ``first``: the number of the first batch."""

    def __init__(
        self, ledger: Ledger, consumer: str, ranks: int, *, answer: Callable[[Lease, int], T], first: int = 0
    ) -> None:
        self.ranks = ranks
        self.first = first
        """The first batch that not every rank has acknowledged."""
        self._ledger = ledger
        self._consumer = consumer
        self._answer = answer
        self.next = first
        """The first batch that was never cut."""
        self._cuts: dict[int, _Cut[T]] = {}
        """By number: those that are held, and those that were given back."""
        self._numbers: dict[int, int] = {}
        """By lease."""
        self._until: dict[int, float] = {}
        """Until when each rank that was heard of may be silent."""
        self._acknowledged: dict[int, None] = {}
        """Leases, the latest last."""

    def at_least(self, groups: int, at_least: int) -> int:
        """How many of ``groups`` must be ready so that each rank gets one of this batch and, if some are left, of the
        next."""
        return groups if groups < 2 * self.ranks else max(at_least, self.ranks)

    @property
    def held(self) -> bool:
        """Whether a batch is on lease."""
        return any(True for _ in self._held())

    def is_over(self, batch: int) -> bool:
        """Whether every rank has acknowledged it."""
        return batch < self.next and batch not in self._cuts

    def is_cut(self, batch: int) -> bool:
        """Whether it is on lease: there are shares of it to be had."""
        return batch in self._cuts and self._cuts[batch].lease in self._ledger.leases

    def share(self, batch: int, rank: int, *, now: float, seconds: float) -> T:
        """Of a batch that is cut."""
        self._hear(rank, now + seconds)
        return self._cuts[batch].answers[rank]

    def cut(
        self,
        batch: int,
        *,
        groups: int,
        at_least: int,
        now: float,
        seconds: float,
        token_budget: int | None = None,
        min_version: int | None = None,
    ) -> bool:
        """Cut a batch, which is ``next`` or was given back, of up to ``groups`` groups, if so many are ready as
        :meth:`at_least` says. ``token_budget``: of one rank; passed only by a group that does so alone, or where a rank
        would be left without a group."""
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
        self._forget(batch)
        self._numbers[lease.lease] = batch
        heard = {rank for rank, until in self._until.items() if until > now}
        answers = tuple(self._answer(replace(lease, groups=share), len(lease.groups)) for share in self._divide(lease))
        self._cuts[batch] = _Cut(lease.lease, answers, set(range(self.ranks)), heard)
        self.next = max(self.next, batch + 1)
        return True

    def _divide(self, lease: Lease) -> list[Array]:
        tokens = self._ledger.group_tokens(lease.groups)
        return [lease.groups[places] for places in balanced_shares(tokens, self.ranks)]

    def acknowledge(self, lease: int, rank: int) -> tuple[Lease, Array] | None:
        """A rank is done with its share; what :meth:`Ledger.acknowledge` returns when it was the last one. Any process
        of the rank may say so, and again. ValueError when the batch was given back before."""
        if lease in self._acknowledged:
            return None
        cut = self._cut(lease)
        cut.missing.discard(rank)
        if cut.missing:
            self._hold(cut)
            return None
        self._forget(self._numbers[lease])
        self._acknowledged[lease] = None
        if len(self._acknowledged) > _REMEMBERED:
            del self._acknowledged[next(iter(self._acknowledged))]
        while self.first < self.next and self.first not in self._cuts:
            self.first += 1
        return self._ledger.acknowledge(lease)

    def extend(self, lease: int, rank: int, *, until: float) -> None:
        """A rank is there, and holds on until then to all it has not acknowledged. ValueError when this batch was
        given back."""
        if lease not in self._acknowledged:
            self._cut(lease)
        self._hear(rank, until)

    def _cut(self, lease: int) -> _Cut[T]:
        if lease not in self._numbers or lease not in self._ledger.leases:
            raise ValueError(f"lease {lease} is not held: a rank released its batch, or was silent for too long")
        return self._cuts[self._numbers[lease]]

    def _held(self) -> Iterator[_Cut[T]]:
        return (cut for cut in self._cuts.values() if cut.lease in self._ledger.leases)

    def _hear(self, rank: int, until: float) -> None:
        self._until[rank] = max(until, self._until.get(rank, until))
        for cut in self._held():
            cut.heard.add(rank)
            self._hold(cut)

    def _hold(self, cut: _Cut[T]) -> None:
        due = [self._until[rank] for rank in cut.heard & cut.missing]
        if due:
            self._ledger.extend(cut.lease, deadline=min(due))

    def _forget(self, batch: int) -> None:
        cut = self._cuts.pop(batch, None)
        if cut is not None:
            del self._numbers[cut.lease]
