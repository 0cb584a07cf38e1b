"""Batches of a partition that data-parallel ranks share, as their calls say it."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import msgspec

from headrace.contract import Array
from headrace.dataplane.messages import Granted, Holder, LeaseCall, Share
from headrace.errors import ContractError, RunError
from headrace.flow.leases import Lease
from headrace.flow.ledger import Ledger
from headrace.flow.shares import Shares


class Sharing:
    """``answer``: what is granted of a lease, which of several ranks share; and how many groups they share."""

    def __init__(self, ledger: Ledger, answer: Callable[[Lease, int], Granted]) -> None:
        self._ledger = ledger
        self._answer = answer
        self._shares: dict[str, Shares[Granted]] = {}
        self._begin: dict[str, int] = {}
        """Batches with which consumers go on that shared some at an earlier ledger."""

    def firsts(self) -> dict[str, int]:
        """What :meth:`first` is of each consumer that shares batches."""
        return {consumer: self.first(consumer) for consumer in [*self._begin, *self._shares]}

    def restore(self, firsts: dict[str, int]) -> None:
        """Go on where an earlier ledger was; none of its batches is held."""
        self._begin.update(firsts)

    def check(self, call: LeaseCall, share: Share) -> LeaseCall:
        """The call, with the fewest groups that it can be answered with. ContractError for what no group of ranks would
        ask for; RunError for a batch that every rank has acknowledged, or when the rank was not given one before it."""
        if not 0 <= share.rank < share.ranks or share.batch < 0:
            raise ContractError(
                f"batch {share.batch} for rank {share.rank} of {share.ranks}",
                fix="batches and ranks are counted from 0 on",
            )
        if call.groups < share.ranks:
            raise ContractError(
                f"{call.groups} groups for {share.ranks} ranks",
                fix="ask for at least one group a rank: groups >= ranks",
            )
        shares = self._of(call.consumer, share)
        if shares.is_over(share.batch):
            raise RunError(
                f"batch {share.batch} of {call.consumer} was acknowledged by every rank",
                fix=f"begin with batch {shares.first}, the first that was not",
            )
        skipped = shares.skipped(share.batch, share.rank)
        if skipped is not None:
            raise RunError(
                f"rank {share.rank} asks for batch {share.batch} of {call.consumer}, and was not given batch {skipped} "
                "or it was given back, because a rank released its share or was silent for too long",
                fix=f"begin with batch {shares.first}, as every rank must, and ask for one after another",
            )
        return msgspec.structs.replace(call, at_least=shares.at_least(call.groups, call.at_least))

    def _of(self, consumer: str, share: Share) -> Shares[Granted]:
        shares = self._shares.get(consumer)
        if shares is None or shares.ranks != share.ranks:
            if shares is not None and shares.held:
                raise ContractError(
                    f"{shares.ranks} ranks share the batches of {consumer}, and rank {share.rank} says {share.ranks}",
                    fix="give every rank the same number; another number can begin when no batch is on lease",
                )
            first = self.first(consumer)
            shares = Shares(self._ledger, consumer, share.ranks, answer=self._answer, first=first)
            self._shares[consumer] = shares
        return shares

    def is_cut(self, call: LeaseCall, share: Share) -> bool:
        """Whether :meth:`grant` has an answer whatever is ready. The call was checked."""
        return self._shares[call.consumer].is_cut(share.batch)

    def grant(self, call: LeaseCall, share: Share) -> Granted | None:
        """A rank's share, if there is enough. The call was checked."""
        shares, now = self._shares[call.consumer], monotonic()
        if shares.ranks != share.ranks or shares.is_over(share.batch):  # meanwhile, while it waited
            return None
        if shares.skipped(share.batch, share.rank) is not None:  # as well
            return None
        if not shares.is_cut(share.batch) and not shares.cut(
            groups=call.groups,
            at_least=call.at_least,
            now=now,
            seconds=call.seconds,
            token_budget=call.token_budget or None,
            min_version=call.min_version or None,
        ):
            return None
        return shares.share(share.batch, share.rank, now=now, seconds=call.seconds)

    def first(self, consumer: str) -> int:
        """The first batch that not every rank has acknowledged."""
        return self._shares[consumer].first if consumer in self._shares else self._begin.get(consumer, 0)

    def acknowledge(self, lease: int, holder: Holder) -> tuple[Lease, Array] | None:
        """A rank is done; see :meth:`Shares.acknowledge`. ValueError when the batch was given back."""
        return self._held_by(lease, holder).acknowledge(lease, holder.rank)

    def extend(self, lease: int, holder: Holder, until: float) -> None:
        """A rank holds on. ValueError when the batch was given back."""
        self._held_by(lease, holder).extend(lease, holder.rank, until=until)

    def release(self, lease: int, holder: Holder) -> tuple[Lease, ...]:
        """A rank gives a batch back, and all that are later; see :meth:`Shares.release`."""
        return self._held_by(lease, holder).release(lease)

    def _held_by(self, lease: int, holder: Holder) -> Shares[Granted]:
        shares = self._shares.get(holder.consumer)
        if shares is None or not 0 <= holder.rank < shares.ranks:
            raise ValueError(f"lease {lease} is not held by rank {holder.rank} of {holder.consumer!r}")
        return shares
