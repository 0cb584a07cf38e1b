"""Batches that ranks share, against a plain model, whatever the order of calls (RLX-6)."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.contract import Array
from headrace.flow.leases import Lease
from headrace.flow.ledger import Ledger
from headrace.flow.shares import Shares
from support.profiles import machine

SECONDS = 10.0


class ModelBatch:
    """``deadline``: when it ends unless somebody is heard of; ``given``: ranks that were told of their share."""

    def __init__(self, shares: list[list[int]], lease: int, deadline: float) -> None:
        self.shares, self.lease, self.deadline = shares, lease, deadline
        self.missing = set(range(len(shares)))
        self.given: set[int] = set()


class SharesMachine(RuleBasedStateMachine):
    @initialize(ranks=st.integers(1, 4), group_size=st.integers(1, 2))
    def begin(self, ranks: int, group_size: int) -> None:
        self.ranks, self.size, self.now = ranks, group_size, 0.0
        self.ledger = Ledger(group_size=group_size, columns=("x",), consumers={"train": ("x",), "other": ("x",)})
        self.shares = Shares(self.ledger, "train", ranks, answer=self.answer)
        self.put: dict[int, int] = {}
        """Tokens by group."""
        self.until: dict[int, float] = {}
        """Of ranks that were heard of since a batch was given back."""
        self.held: dict[int, ModelBatch] = {}
        self.over: set[int] = set()
        self.ended: list[int] = []
        self.acknowledged: list[int] = []
        self.next = 0
        self.insert([1, 50] * 8)

    def answer(self, lease: Lease, groups: int) -> tuple[int, list[int], int]:
        return lease.lease, lease.groups.tolist(), groups

    @rule(tokens=st.lists(st.integers(1, 100), min_size=1, max_size=20))
    def insert(self, tokens: list[int]) -> None:
        each: Array = np.repeat(np.array(tokens), self.size)
        first = self.ledger.insert(len(tokens), 0, ("x",), nbytes=1, tokens=each)
        self.put |= {first + place: count * self.size for place, count in enumerate(tokens)}

    @rule(data=st.data(), budget=st.sampled_from([None, 40, 150]), more=st.integers(0, 5), least=st.integers(1, 3))
    def ask(self, data: st.DataObject, budget: int | None, more: int, least: int) -> None:
        rank, groups = data.draw(st.integers(0, self.ranks - 1)), self.ranks + more
        possible = [number for number in range(self.next + 2) if number not in self.over]
        due = next(number for number in possible if rank not in self.given(number))
        batch = data.draw(st.sampled_from([due, due, due, *possible]))
        assert not self.shares.is_over(batch)
        assert self.shares.is_cut(batch) == (batch in self.held)
        skipped = [number for number in range(batch) if number not in self.over and rank not in self.given(number)]
        assert self.shares.skipped(batch, rank) == (skipped[0] if skipped else None)
        if skipped:
            return
        if batch not in self.held:
            ready = sum(self.ledger.ready("train").values())
            least = self.shares.at_least(groups, least)
            cut = self.shares.cut(groups=groups, at_least=least, now=self.now, seconds=SECONDS, token_budget=budget)
            assert cut == (ready >= least)
            if not cut:
                return
            self.remember(batch, groups, budget, ready)
        lease, share, total = self.shares.share(batch, rank, now=self.now, seconds=SECONDS)
        model = self.held[batch]
        assert (lease, share, total) == (model.lease, model.shares[rank], sum(map(len, model.shares)))
        model.given.add(rank)
        self.hear(rank)

    def given(self, batch: int) -> set[int]:
        return self.held[batch].given if batch in self.held else set()

    def remember(self, batch: int, groups: int, budget: int | None, ready: int) -> None:
        answers = self.shares._cuts[batch].answers
        shares = [share for _, share, _ in answers]
        given = list(itertools.chain.from_iterable(shares))
        counts = [len(share) for share in shares]
        assert len(set(given)) == len(given) <= min(groups, ready)
        assert min(counts) >= 1
        assert max(counts) - min(counts) <= 1
        taken = {group for held in self.held.values() for share in held.shares for group in share}
        assert not taken & set(given)
        assert not set(self.acknowledged) & set(given)
        assert len(given) == groups or groups - len(given) >= self.ranks, "what is left of a step is enough for all"
        if budget is not None and groups >= 2 * self.ranks:
            assert all(len(s) == 1 or sum(self.put[g] for g in s) <= budget for s in shares) or len(given) == self.ranks
        self.held[batch] = ModelBatch(shares, answers[0][0], self.now + SECONDS)
        self.until = {rank: max(until, self.now + SECONDS) for rank, until in self.until.items()}
        self.next = batch + 1
        self.judge()

    def hear(self, rank: int) -> None:
        self.until[rank] = self.now + SECONDS
        self.judge()

    def judge(self) -> None:
        """Of an earlier batch the deadline is no earlier."""
        for batch, held in sorted(self.held.items()):
            due = [self.until[rank] for rank in held.missing if rank in self.until]
            before = [self.held[number].deadline for number in self.held if number < batch]
            held.deadline = min(before + (due or [held.deadline]))

    def give_back(self, batch: int) -> set[int]:
        """With all that are later; returns their leases."""
        leases = {self.held.pop(number).lease for number in sorted(self.held) if number >= batch}
        self.over -= {number for number in self.over if number >= batch}
        self.ended += leases
        self.until, self.next = {}, batch
        return leases

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, self.ranks - 1))
        batch = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[batch]
        held.missing.discard(rank)
        done = self.shares.acknowledge(held.lease, rank)
        assert (done is not None) == (not held.missing)
        if held.missing:
            self.judge()
            return
        del self.held[batch]
        self.over.add(batch)
        self.acknowledged += [group for share in held.shares for group in share]
        assert self.shares.acknowledge(held.lease, rank) is None, "another process of the rank is not told off"

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, self.ranks - 1))
        batch = data.draw(st.sampled_from(sorted(self.held)))
        self.shares.extend(self.held[batch].lease, rank, until=self.now + SECONDS)
        self.hear(rank)

    @precondition(lambda self: len(self.held) > 2)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(sorted(self.held)))
        ended = self.shares.release(self.held[batch].lease)
        assert {lease.lease for lease in ended} == self.give_back(batch)

    @precondition(lambda self: len(self.held) > 2)
    @rule()
    def all_are_known_to_be_gone(self) -> None:
        for lease in reversed(self.ledger.leases.of("train")):
            self.ledger.release(lease)
        self.give_back(min(self.held))

    @rule(seconds=st.sampled_from([1.0, 4.0, 4.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        expired = {lease.lease for lease in self.ledger.expire(self.now)}
        due = [batch for batch, held in self.held.items() if held.deadline <= self.now]
        assert expired == {self.held[batch].lease for batch in due}
        if due:
            assert self.give_back(min(due)) == expired

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def speak_late(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.ended))
        for call in (
            lambda: self.shares.acknowledge(lease, 0),
            lambda: self.shares.extend(lease, 0, until=self.now + SECONDS),
            lambda: self.shares.release(lease),
        ):
            try:
                call()
            except ValueError:
                continue
            raise AssertionError("who speaks of a batch that was given back is told so")

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "shares"):
            return
        held = sum(len(share) for batch in self.held.values() for share in batch.shares)
        ready = sum(self.ledger.ready("train").values())
        assert held + ready + len(self.acknowledged) == len(self.put)
        assert len(set(self.acknowledged)) == len(self.acknowledged)
        assert self.shares.first == next(number for number in itertools.count() if number not in self.over)
        assert self.shares.held == bool(self.held)


TestShares = SharesMachine.TestCase
TestShares.settings = machine(examples=150, steps=50)
