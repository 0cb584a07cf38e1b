"""Batches that ranks share, against a plain model, whatever the order of calls (RLX-6)."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.contract import Array
from headrace.flow.leases import Lease
from headrace.flow.ledger import Ledger
from headrace.flow.shares import Shares

SECONDS = 10.0


class ModelBatch:
    """``deadline``: when it ends unless somebody is heard of; ``heard``: ranks whose silence ends it."""

    def __init__(self, shares: list[list[int]], lease: int, deadline: float) -> None:
        self.shares, self.lease, self.deadline = shares, lease, deadline
        self.missing = set(range(len(shares)))
        self.heard: set[int] = set()


class SharesMachine(RuleBasedStateMachine):
    @initialize(ranks=st.integers(1, 4), group_size=st.integers(1, 2))
    def begin(self, ranks: int, group_size: int) -> None:
        self.ranks, self.size, self.now = ranks, group_size, 0.0
        self.ledger = Ledger(group_size=group_size, columns=("x",), consumers={"train": ("x",), "other": ("x",)})
        self.shares = Shares(self.ledger, "train", ranks, answer=self.answer)
        self.put: dict[int, int] = {}
        """Tokens by group."""
        self.until: dict[int, float] = {}
        self.held: dict[int, ModelBatch] = {}
        self.over: set[int] = set()
        self.ended: list[int] = []
        self.acknowledged: list[int] = []
        self.next = 0

    def answer(self, lease: Lease, groups: int) -> tuple[int, list[int], int]:
        return lease.lease, lease.groups.tolist(), groups

    @rule(tokens=st.lists(st.integers(1, 100), min_size=1, max_size=8))
    def insert(self, tokens: list[int]) -> None:
        each: Array = np.repeat(np.array(tokens), self.size)
        first = self.ledger.insert(len(tokens), 0, ("x",), nbytes=1, tokens=each)
        self.put |= {first + place: count * self.size for place, count in enumerate(tokens)}

    @rule(data=st.data(), budget=st.sampled_from([None, 40, 150]), more=st.integers(0, 9), least=st.integers(1, 3))
    def ask(self, data: st.DataObject, budget: int | None, more: int, least: int) -> None:
        batch = data.draw(st.sampled_from([number for number in range(self.next + 1) if number not in self.over]))
        rank, groups = data.draw(st.integers(0, self.ranks - 1)), self.ranks + more
        assert not self.shares.is_over(batch)
        assert self.shares.is_cut(batch) == (batch in self.held)
        if batch not in self.held:
            ready = sum(self.ledger.ready("train").values())
            least = self.shares.at_least(groups, least)
            cut = self.shares.cut(
                batch, groups=groups, at_least=least, now=self.now, seconds=SECONDS, token_budget=budget
            )
            assert cut == (ready >= least)
            if not cut:
                return
            self.remember(batch, groups, budget, ready)
        lease, share, total = self.shares.share(batch, rank, now=self.now, seconds=SECONDS)
        model = self.held[batch]
        assert (lease, share, total) == (model.lease, model.shares[rank], sum(map(len, model.shares)))
        self.hear(rank)

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
        self.held[batch].heard = {rank for rank, until in self.until.items() if until > self.now}
        self.next = max(self.next, batch + 1)

    def hear(self, rank: int) -> None:
        self.until[rank] = self.now + SECONDS
        for held in self.held.values():
            held.heard.add(rank)
            self.judge(held)

    def judge(self, held: ModelBatch) -> None:
        due = [self.until[rank] for rank in held.heard & held.missing]
        held.deadline = min(due, default=held.deadline)

    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, self.ranks - 1))
        if not self.held:
            return
        batch = data.draw(st.sampled_from(sorted(self.held)))
        held = self.held[batch]
        held.missing.discard(rank)
        done = self.shares.acknowledge(held.lease, rank)
        assert (done is not None) == (not held.missing)
        if held.missing:
            self.judge(held)
            return
        del self.held[batch]
        self.over.add(batch)
        self.acknowledged += [group for share in held.shares for group in share]
        assert self.shares.acknowledge(held.lease, rank) is None, "another process of the rank is not told off"

    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        if self.held:
            rank = data.draw(st.integers(0, self.ranks - 1))
            batch = data.draw(st.sampled_from(sorted(self.held)))
            self.shares.extend(self.held[batch].lease, rank, until=self.now + SECONDS)
            self.hear(rank)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            batch = data.draw(st.sampled_from(sorted(self.held)))
            self.ledger.release(self.held[batch].lease)
            self.ended.append(self.held.pop(batch).lease)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        expired = {lease.lease for lease in self.ledger.expire(self.now)}
        due = [batch for batch, held in self.held.items() if held.deadline <= self.now]
        assert expired == {self.held[batch].lease for batch in due}
        for batch in due:
            self.ended.append(self.held.pop(batch).lease)

    @rule(data=st.data())
    def speak_late(self, data: st.DataObject) -> None:
        if self.ended:
            lease = data.draw(st.sampled_from(self.ended))
            for call in (
                lambda: self.shares.acknowledge(lease, 0),
                lambda: self.shares.extend(lease, 0, until=self.now + SECONDS),
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
TestShares.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
