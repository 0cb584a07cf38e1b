"""The ledger against a plain model, under any order of operations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.flow.group_table import WRITTEN
from headrace.flow.leases import Lease
from headrace.flow.ledger import Ledger
from support.profiles import machine

COLUMNS = ("prompt", "answer", "reward", "reference")
READS = {
    "score": ("prompt", "answer"),
    "reference": ("answer",),
    "train": ("answer", "reward"),
}
"""Nobody reads what ``reference`` adds: it may be the last that is done with a group, and so by writing."""
WRITES = {"score": ("reward",), "reference": ("reference",)}
UNITS = 3
ALL = -1
"""In place of a member, for a consumer that is given whole groups."""


@dataclass
class Group:
    version: int
    columns: list[dict[str, int]]
    """Per member: column → unit."""
    versions: list[int | None]
    tokens: list[int]
    nbytes: int = 0
    left: bool = False
    held: dict[tuple[str, int], int] = field(default_factory=dict)
    """(consumer, member, or ``ALL``) → lease."""
    done: set[tuple[str, int]] = field(default_factory=set)
    attempts: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def oldest(self) -> int:
        return min(version for version in self.versions if version is not None)


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        group_size=st.integers(1, 3),
        first=st.integers(0, 5),
        by_row=st.sets(st.sampled_from(["score", "reference"])),
        writers=st.sets(st.sampled_from(["score", "reference"])),
    )
    def begin(self, group_size: int, first: int, by_row: set[str], writers: set[str]) -> None:
        self.by_row, self.writes = by_row, {name: WRITES[name] for name in writers}
        self.size, self.first, self.now = group_size, first, 0.0
        self.groups: dict[int, Group] = {}
        self.leases: dict[int, Lease] = {}
        self.ledger = Ledger(
            group_size=group_size,
            columns=COLUMNS,
            consumers=READS,
            writes=self.writes,
            by_row=by_row,
            first_group=first,
        )

    # ------------------------------------------------------------ producers

    @rule(count=st.integers(1, 6) | st.just(70), version=st.integers(0, 4))
    def open(self, count: int, version: int) -> None:
        start = self.ledger.open_many(count, version)
        assert start == self.first + len(self.groups)
        for group in range(start, start + count):
            self.groups[group] = Group(version, [{} for _ in range(self.size)], [None] * self.size, [0] * self.size)

    @rule(data=st.data(), columns=st.sets(st.sampled_from(COLUMNS), min_size=1), unit=st.integers(1, UNITS))
    def write(self, data: st.DataObject, columns: set[str], unit: int) -> None:
        end = (self.first + len(self.groups)) * self.size
        rows = sorted(data.draw(st.sets(st.integers(0, end + 2), min_size=1, max_size=40)))
        sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows)))
        later = data.draw(st.integers(0, 2))
        versions = [self.version(row) + later for row in rows]
        outcome = self.ledger.write(
            np.array(rows),
            sorted(columns),
            nbytes=np.array(sizes),
            tokens=np.array(sizes),
            versions=np.array(versions),
            unit=unit,
        )
        for row, size, version, code in zip(rows, sizes, versions, outcome.tolist(), strict=True):
            assert WRITTEN[code] == self.write_one(row, columns, size, version, unit)
        self.leave_by_writing()

    @rule(data=st.data(), columns=st.sets(st.sampled_from(COLUMNS), min_size=1), unit=st.integers(1, UNITS))
    def write_row(self, data: st.DataObject, columns: set[str], unit: int) -> None:
        row = data.draw(st.integers(0, (self.first + len(self.groups)) * self.size + 2))
        size, version = data.draw(st.integers(0, 9)), self.version(row) + data.draw(st.integers(0, 2))
        code = self.ledger.write_row(row, sorted(columns), nbytes=size, tokens=size, version=version, unit=unit)
        assert WRITTEN[code] == self.write_one(row, columns, size, version, unit)
        self.leave_by_writing()

    @rule(data=st.data(), columns=st.sampled_from([COLUMNS, *READS.values()]), unit=st.integers(1, UNITS))
    def fill(self, data: st.DataObject, columns: tuple[str, ...], unit: int) -> None:
        """Whole groups, so that there is something to lease."""
        present = [number for number, group in self.groups.items() if not group.left]
        if present:
            chosen = sorted(data.draw(st.sets(st.sampled_from(present), min_size=1, max_size=20)))
            for column in columns:
                rows = [
                    number * self.size + member
                    for number in chosen
                    for member, there in enumerate(self.groups[number].columns)
                    if column not in there
                ]
                outcome = self.ledger.write(np.array(rows, dtype=np.int64), (column,), nbytes=1, tokens=1, unit=unit)
                assert not outcome.any()
                for row in rows:
                    self.write_one(row, {column}, 1, self.version(row), unit)
                self.leave_by_writing()
                chosen = [number for number in chosen if not self.groups[number].left]

    def version(self, row: int) -> int:
        group = self.groups.get(row // self.size)
        return group.version if group else 0

    def write_one(self, row: int, columns: set[str], size: int, version: int, unit: int) -> str:
        number, member = divmod(row, self.size)
        if number not in self.groups:
            return "unknown"
        group = self.groups[number]
        if group.left:
            return "late"
        if columns & group.columns[member].keys():
            return "duplicate"
        if not group.columns[member]:
            group.versions[member] = version
        group.columns[member] |= dict.fromkeys(columns, unit)
        group.tokens[member] += size
        group.nbytes += size
        for consumer, added in self.writes.items():
            for key in self.keys(consumer):
                if all(set(added) <= columns.keys() for columns in self.members(group, key[1])):
                    group.done.add(key)
        return "stored"

    def leave_by_writing(self) -> None:
        left = [n for n, group in self.groups.items() if not group.left and group.done == self.everybody]
        for number in left:
            self.groups[number].left = True
        assert sorted(self.ledger.take_left().tolist()) == left

    @property
    def everybody(self) -> set[tuple[str, int]]:
        return {key for consumer in READS for key in self.keys(consumer)}

    def keys(self, consumer: str) -> list[tuple[str, int]]:
        """What of a group the consumer is given at a time."""
        return [(consumer, member) for member in (range(self.size) if consumer in self.by_row else [ALL])]

    @staticmethod
    def members(group: Group, member: int) -> list[dict[str, int]]:
        return group.columns if member == ALL else [group.columns[member]]

    # ------------------------------------------------------------ consumers

    def ready(self, consumer: str, min_version: int = -1) -> dict[int, list[int]]:
        """Groups, or rows, by version."""
        found: dict[int, list[int]] = {}
        for number, group in self.groups.items():
            for key in self.keys(consumer):
                whole = all(set(READS[consumer]) <= columns.keys() for columns in self.members(group, key[1]))
                if whole and not group.left and key not in group.held and key not in group.done:
                    version = group.oldest if key[1] == ALL else group.version
                    if version >= min_version:
                        found.setdefault(version, []).append(self.id(number, key[1]))
        return found

    def id(self, number: int, member: int) -> int:
        return number if member == ALL else number * self.size + member

    def place(self, consumer: str, id: int) -> tuple[int, int]:
        """Group and member."""
        return divmod(id, self.size) if consumer in self.by_row else (id, ALL)

    @rule(
        consumer=st.sampled_from(sorted(READS)),
        count=st.integers(1, 4),
        at_least=st.none() | st.integers(1, 4),
        budget=st.none() | st.integers(1, 20),
        min_version=st.none() | st.integers(0, 5),
        ttl=st.integers(3, 20),
        choose=st.sampled_from([False, False, True]),
        data=st.data(),
    )
    def lease(
        self,
        consumer: str,
        count: int,
        at_least: int | None,
        budget: int | None,
        min_version: int | None,
        ttl: int,
        choose: bool,
        data: st.DataObject,
    ) -> None:
        ready = self.ready(consumer, -1 if min_version is None else min_version)
        chosen: list[int] | None = None
        if choose:  # of all there ever were, and of what never was
            end = (self.first + len(self.groups) + 2) * (self.size if consumer in self.by_row else 1)
            chosen = data.draw(st.lists(st.integers(-1, end), max_size=3))
            chosen += data.draw(st.permutations(self.ledger.candidates(consumer)[0].tolist()))[:20]
            wanted = [id for id in dict.fromkeys(chosen) if any(id in ids for ids in ready.values())]
            ready = {version: [id for id in ids if id in wanted] for version, ids in ready.items()}
        versions = {number: version for version, numbers in ready.items() for number in numbers}
        lease = self.ledger.lease(
            consumer,
            count,
            deadline=self.now + ttl,
            at_least=at_least,
            token_budget=budget,
            min_version=min_version,
            chosen=None if chosen is None else np.array(chosen, dtype=np.int64),
        )
        if lease is None:
            assert len(versions) < (count if at_least is None else at_least) or not versions
            return
        given = (lease.groups if lease.rows is None else lease.rows).tolist()
        assert set(lease.groups.tolist()) == {self.place(consumer, number)[0] for number in given}
        assert len(versions) >= (count if at_least is None else at_least)
        assert len(set(given)) == len(given) <= count
        assert set(given) <= versions.keys(), "complete, not held, not acknowledged, not too old"
        left = [version for number, version in versions.items() if number not in given]
        assert chosen is None or given == wanted[: len(given)], "in the order that was wanted"
        assert chosen is not None or not left or max(versions[number] for number in given) <= min(left), (
            "oldest version first"
        )
        rows = self.ledger.contents(lease)[0][0].tolist()
        tokens = sum(self.groups[row // self.size].tokens[row % self.size] for row in rows)
        if budget is None:
            assert len(given) == min(count, len(versions))
        else:
            assert tokens <= budget or len(given) == 1
        self.leases[lease.lease] = lease
        table, _ = self.ledger.contents(lease)
        assert table[0].tolist() == rows
        for id in given:
            number, member = self.place(consumer, id)
            group, key = self.groups[number], (consumer, member)
            group.held[key] = lease.lease
            group.attempts[key] = group.attempts.get(key, 0) + 1
        for row, attempts in zip(rows, table[2].tolist(), strict=True):
            member = row % self.size if consumer in self.by_row else ALL
            assert attempts == self.groups[row // self.size].attempts[consumer, member]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        held, left = self.ledger.acknowledge(lease)
        gone = self.end(lease, done=True)
        assert held.lease == lease
        assert left.tolist() == gone

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        self.ledger.release(lease)
        self.end(lease, done=False)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), ttl=st.integers(1, 9))
    def extend(self, data: st.DataObject, ttl: int) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        self.ledger.extend(lease, deadline=self.now + ttl)
        old = self.leases[lease]
        self.leases[lease] = replace(old, deadline=self.now + ttl)

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        due = {lease for lease, held in self.leases.items() if held.deadline <= self.now}
        assert {lease.lease for lease in self.ledger.expire(self.now)} == due
        for lease in due:
            self.end(lease, done=False)

    def end(self, lease: int, *, done: bool) -> list[int]:
        held = self.leases.pop(lease)
        gone = []
        for id in (held.groups if held.rows is None else held.rows).tolist():
            number, member = self.place(held.consumer, id)
            group, key = self.groups[number], (held.consumer, member)
            del group.held[key]
            if done and not group.left:
                group.done.add(key)
        for number in held.groups.tolist() if done else ():
            group = self.groups[number]
            if not group.left and group.done == self.everybody:
                group.left = True
                gone.append(number)
        return gone

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        free = [number for number, group in self.groups.items() if not group.left and not group.held]
        if free:
            number = data.draw(st.sampled_from(free))
            group = self.groups[number]
            assert self.ledger.drop(number) == sum(map(bool, group.columns))
            group.left = True

    @rule(unit=st.integers(1, UNITS))
    def lose(self, unit: int) -> None:
        lost = [
            number
            for number, group in self.groups.items()
            if not group.left and any(unit in columns.values() for columns in group.columns)
        ]
        assert self.ledger.lose(unit).tolist() == lost
        for number in lost:
            self.groups[number].left = True

    # ------------------------------------------------------------ always

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "groups"):
            return
        present = [group for group in self.groups.values() if not group.left]
        assert self.ledger.nbytes == sum(group.nbytes for group in present)
        assert self.ledger.buffered == sum(bool(columns) for group in present for columns in group.columns)
        for consumer in READS:
            expected = {version: len(numbers) for version, numbers in self.ready(consumer).items()}
            assert self.ledger.ready(consumer) == expected
        assert list(self.ledger.open_groups()) == [n for n, group in self.groups.items() if not group.left]

    @invariant()
    def every_column_is_where_it_was_put(self) -> None:
        for number, group in getattr(self, "groups", {}).items():
            if not group.left:
                units = self.ledger.units_of(np.array(self.ledger.rows(number)))
                expected = [[columns.get(name, 0) for name in COLUMNS] for columns in group.columns]
                assert units.tolist() == expected


LedgerMachine.TestCase.settings = machine(examples=150, steps=50, suppress_health_check=list(HealthCheck))
TestLedgerAgreesWithAPlainModel = LedgerMachine.TestCase
