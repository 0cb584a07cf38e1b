"""The whole data plane against a plain model, under any order of operations.

``tests/core/flow/test_ledger_machine.py`` does the same for the ledger's logic alone; here values travel, units are
lost and time ends leases. What is proven where, as far as a data plane can prove it:

    AFL-1, RLX-4   given complete, delayed by no column that is not read      here (lease, stats_agree, get)
    AFL-2, RLX-5   each row to each consumer once; the union is all           here (lease, drain)
    AFL-3          the ledger hears no payload; late comers see the same      test_plane_traffic.py
    AFL-4          a read moves the columns it names, without padding         test_plane_traffic.py
    AFL-5          what one consumer does, no other sees                      here (stats_agree after each rule)
    AFL-6          groups are given whole                                     here (lease)
    AFL-10         who is faster gets more                                    test_plane_waiting.py
    RLX-1          none older than ``min_version`` is given                   here (lease); core/flow/test_windowed.py
    RLX-2          a unit holds at most its capacity                          tests/cases/test_cases_data_plane.py, J02
                   at most S + 1 iterations coexist                           core/flow/test_windowed.py
    RLX-3          staleness changes nothing but who may start                core/flow/test_windowed.py, e2e
    RLX-6          ranks of one group see the same rows                       test_plane_ranks.py, core/flow
    RLX-12         streamed or whole, what is computed of a group is equal    test_plane_traffic.py
    DORA-2         put = acknowledged + here + dropped + lost                 here (drain), e2e with kills
    DORA-11        short rows are not preferred                               test_plane_traffic.py

``test_plane_rules.py`` has a small example for each that is proven here, named after it.
Now and then all services end and a snapshot is brought back: what was not acknowledged when it was taken is offered
again, once to each consumer, nothing else is, and everything below still holds.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Collection, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.contract import Array, Batch, Column
from headrace.dataplane import PartitionSpec, Rows
from headrace.errors import DeadlineError, LostRowsError, RunError
from support.plane_model import ALL, COLUMNS, READS, STORED, WRITES, Group, Held, Kept, PlaneModel, Row, join, value
from support.plane_world import World

AT_ONCE = 1e-6
"""Seconds to wait for what should be there."""
MANY_COLUMNS = [tuple(COLUMNS), tuple(COLUMNS), ("tokens", "reward"), ("tokens",), ("pixels", "reward")]
"""What is put at once; mostly what consumers can begin with."""
STEPS = {
    "put": 2, "add": 2, "lease": 5, "get": 3, "acknowledge": 2, "release": 1, "extend": 1, "speak_late": 1,
    "time_passes": 2, "drop": 1, "a_unit_joins": 1, "lose": 1, "drain": 1, "snapshot": 1, "restore": 1,
}  # fmt: skip
"""By how often they happen. They are one rule: of several, some would be left out of many a run."""
SILENCE = 7
"""Seconds after which a unit that is gone is missed."""


class PlaneMachine(PlaneModel, RuleBasedStateMachine):
    @initialize(
        group_size=st.integers(1, 3),
        shards=st.sampled_from([1, 1, 2, 3]),
        own=st.booleans(),
        by_row=st.sets(st.sampled_from(["score", "look"])),
        writers=st.sets(st.sampled_from(sorted(WRITES))),
        by_content=st.booleans(),
    )
    def begin(
        self, group_size: int, shards: int, own: bool, by_row: set[str], writers: set[str], by_content: bool
    ) -> None:
        self.size, self.shards, self.by_row = group_size, shards, by_row
        self.writes = {consumer: WRITES[consumer] for consumer in sorted(writers)}
        self.directory = tempfile.TemporaryDirectory()
        self.file = Path(self.directory.name) / "snapshot"
        self.snapshot_of: Kept | None = None
        self.world = World(own=own and shards == 1, shards=shards)
        self.units = [self.world.unit() for _ in range(2)]
        self.shared = {"pixels"} if by_content else set()
        spec = PartitionSpec("phase", self.schemas(), READS, group_size, "tokens", self.writes, tuple(sorted(by_row)))
        self.partition = self.world.plane().create(spec)
        self.groups: dict[int, Group] = {}
        self.leases: dict[int, Held] = {}
        self.ended: list[Rows] = []
        self.lost: list[int] = []
        self.acknowledged: Counter[tuple[str, int]] = Counter()
        self.serial = 0
        self.attempts: Counter[tuple[str, int]] = Counter()
        self.put_groups(4, tuple(COLUMNS), 1)

    @property
    def now(self) -> float:
        return self.world.clock.now

    @rule(step=st.sampled_from([name for name, often in STEPS.items() for _ in range(often)]), data=st.data())
    def step(self, step: str, data: st.DataObject) -> None:
        if step in ("get", "acknowledge", "release", "extend") and self.leases:
            getattr(self, step)(data.draw(st.sampled_from(sorted(self.leases))), data)
        elif step in ("get", "acknowledge", "release", "extend"):
            self.lease(data)
        else:
            getattr(self, step)(data)

    # ------------------------------------------------------------ producers

    def put(self, data: st.DataObject) -> None:
        columns, version = data.draw(st.sampled_from(MANY_COLUMNS)), data.draw(st.integers(0, 3))
        self.put_groups(data.draw(st.integers(1, 6)), columns, version)

    def put_groups(self, count: int, columns: tuple[str, ...], version: int) -> None:
        made = self.make(count * self.size, columns)
        rows = self.partition.put(self.joined(made, columns), version=version).tolist()
        assert rows == list(range(rows[0], rows[0] + len(rows)))
        assert rows[0] % self.size == 0
        for start in range(0, len(rows), self.size):
            number = rows[start] // self.size
            assert number not in self.groups, "an id is given once"
            self.groups[number] = Group(version, [Row() for _ in range(self.size)])
        self.keep(dict(zip(rows, made, strict=True)))

    def add(self, data: st.DataObject) -> None:
        column = data.draw(st.sampled_from(sorted(COLUMNS)))
        known = [number * self.size + member for number in self.groups for member in range(self.size)]
        rows = sorted(data.draw(st.sets(st.sampled_from([*known, known[-1] + 1]), min_size=1, max_size=9)))
        made = self.make(len(rows), {column})
        noted = self.partition.try_put(self.joined(made, {column}), rows=np.array(rows))
        codes = [STORED] * len(rows) if noted.refused is None else noted.refused.tolist()
        assert codes == [self.expected_code(row, column) for row in rows]
        self.keep({row: values for row, values, code in zip(rows, made, codes, strict=True) if code == STORED})

    def make(self, count: int, columns: Collection[str]) -> list[dict[str, Array]]:
        self.serial += count
        return [{name: value(name, self.serial + place) for name in columns} for place in range(count)]

    def joined(self, made: list[dict[str, Array]], columns: Collection[str]) -> dict[str, Column]:
        return {name: join(name, [values[name] for values in made]) for name in sorted(columns)}

    def keep(self, put: dict[int, dict[str, Array]]) -> None:
        """Where a unit has it, a look at the units tells: producers take them in turn."""
        for row, values in put.items():
            self.row(row).values |= values
            self.finish(self.groups[row // self.size])
        for row, values in put.items():
            group = self.groups[row // self.size]
            self.row(row).units |= {} if group.gone and not group.held else {n: self.unit_of(row, n) for n in values}

    def unit_of(self, row: int, name: str) -> str:
        (unit,) = [unit for unit, storage in self.world.storages.items() if self.there(storage, row, name)]
        return unit

    # ------------------------------------------------------------ consumers

    def lease(self, data: st.DataObject) -> None:
        consumer, count = data.draw(st.sampled_from(sorted(READS))), data.draw(st.integers(1, 6))
        budget, min_version = data.draw(st.sampled_from([0, 0, 3, 12])), data.draw(st.sampled_from([0, 0, 0, 1, 2]))
        at_least, seconds = data.draw(st.sampled_from([1, 1, 1, count])), data.draw(st.integers(1, 9))
        ready = self.ready(consumer, min_version)
        deadline = self.now + seconds + 0.6  # never a moment at which a rule looks
        how: dict[str, Any] = {
            "at_least": at_least,
            "token_budget": budget,
            "min_version": min_version,
            "seconds": seconds + 0.6,
        }
        try:
            if data.draw(st.booleans()):
                rows, batch = self.partition.take(consumer, count, **how, deadline=AT_ONCE)
                self.check(batch, rows, READS[consumer])
            else:
                rows = self.partition.lease(consumer, count, **how, deadline=AT_ONCE)
        except DeadlineError:
            assert len(ready) < at_least
            return
        assert len(ready) >= at_least
        given = self.ids(rows)
        assert rows.rows.tolist() == self.rows_of(consumer, given), "whole groups"
        assert rows.groups == len(given)
        assert set(given) <= set(ready), "complete, not held, not acknowledged, not too old"
        assert len(set(given)) == len(given) <= count
        versions = {id: self.place(consumer, id)[0].version for id in ready}
        left = [version for id, version in versions.items() if id not in given]
        assert not left or max(versions[id] for id in given) <= min(left), "oldest version first"
        tokens = sum(rows.tokens.tolist())
        assert tokens == sum(len(self.row(row).values.get("tokens", ())) for row in rows.rows.tolist())
        assert len(given) == min(count, len(ready)) if not budget else tokens <= budget or len(given) == 1
        self.hold(rows, given, deadline)

    def get(self, lease: int, data: st.DataObject) -> None:
        held = self.leases[lease]
        reads = READS[held.rows.consumer]
        columns = sorted(data.draw(st.sets(st.sampled_from(reads), min_size=1)))
        try:
            batch = self.partition.get(held.rows, columns, deadline=AT_ONCE)
        except LostRowsError:
            rows = held.rows.rows.tolist()
            assert any(self.row(row).units[column] not in self.world.storages for row in rows for column in columns)
            return
        self.check(batch, held.rows, columns)

    def check(self, batch: Batch, rows: Rows, columns: Sequence[str]) -> None:
        assert batch.rows.tolist() == rows.rows.tolist()
        assert sorted([*batch.columns, *batch.repeated]) == sorted(columns), "no column that was not asked for"
        for column in columns:
            found = batch.repeated[column].column() if column in batch.repeated else batch.columns[column]
            for place, row in enumerate(rows.rows.tolist()):
                expected, got = self.value_of(row, column), found[place]
                assert (got.dtype, got.shape, got.tolist()) == (expected.dtype, expected.shape, expected.tolist())

    def acknowledge(self, lease: int, data: st.DataObject) -> None:
        if self.has_lost(lease):
            with pytest.raises(LostRowsError):
                self.partition.acknowledge(self.leases[lease].rows)
            self.end(lease, done=False)
            return
        self.partition.acknowledge(self.leases[lease].rows)
        self.end(lease, done=True)

    def release(self, lease: int, data: st.DataObject) -> None:
        self.partition.release(self.leases[lease].rows)
        self.end(lease, done=False)

    def extend(self, lease: int, data: st.DataObject) -> None:
        held, seconds = self.leases[lease], data.draw(st.integers(1, 9))
        if self.has_lost(lease):
            with pytest.raises(LostRowsError):
                self.partition.extend(held.rows, seconds + 0.6)
            self.release(lease, data)
            return
        self.partition.extend(held.rows, seconds + 0.6)
        held.deadline = self.now + seconds + 0.6

    def has_lost(self, lease: int) -> bool:
        """While it was held."""
        held = self.leases[lease]
        return any(self.place(held.rows.consumer, id)[0].gone == "lost" for id in held.ids)

    def speak_late(self, data: st.DataObject) -> None:
        if not self.ended:
            return
        rows = data.draw(st.sampled_from(self.ended))
        speak = data.draw(st.sampled_from([self.partition.acknowledge, self.partition.release, self.partition.extend]))
        with pytest.raises(RunError, match="is not held"):
            speak(rows)

    def end(self, lease: int, *, done: bool) -> None:
        held = self.leases.pop(lease)
        self.ended.append(held.rows)
        for id in held.ids:
            group, key = self.place(held.rows.consumer, id)
            del group.held[key]
            if done and not group.gone:
                self.acknowledged[held.rows.consumer, id] += 1
                group.done.add(key)
                if len(group.done) == len(self.everybody):
                    group.gone = "done"

    # ------------------------------------------------------------ time, and what is given up

    def time_passes(self, data: st.DataObject) -> None:
        self.world.wait(data.draw(st.integers(1, 3)))
        self.expire()

    def expire(self) -> None:
        for lease in [lease for lease, held in self.leases.items() if held.deadline <= self.now]:
            self.end(lease, done=False)

    def drop(self, data: st.DataObject) -> None:
        chosen = sorted(data.draw(st.sets(st.sampled_from(sorted(self.groups)), min_size=1, max_size=3)))
        self.partition.drop([*chosen, max(self.groups) + 7, chosen[0]])
        for number in chosen:
            self.groups[number].gone = self.groups[number].gone or "dropped"

    def a_unit_joins(self, data: st.DataObject) -> None:
        if len(self.units) < 4:
            self.units.append(self.world.unit())
            self.partition = self.world.plane().partition("phase")

    def lose(self, data: st.DataObject) -> None:
        if len(self.units) < 2:
            return
        unit = data.draw(st.sampled_from(self.units))
        self.units.remove(unit)
        self.world.lose(unit)
        self.world.wait(SILENCE)
        self.expire()
        lost = [
            number
            for number, group in self.groups.items()
            if not group.gone and any(unit in row.units.values() for row in group.rows)
        ]
        for number in lost:
            self.groups[number].gone = "lost"
        assert sorted(self.partition.lost()) == sorted(self.lost + lost), "whoever comes new hears of all"
        assert self.partition.lost() == []
        self.lost += lost
        self.partition = self.world.plane().partition("phase")

    # ------------------------------------------------------------ snapshots

    def snapshot(self, data: st.DataObject) -> None:
        self.world.plane().snapshot(self.file)
        self.snapshot_of = Kept(deepcopy(self.groups), list(self.lost), +self.acknowledged, +self.attempts)

    def restore(self, data: st.DataObject) -> None:
        """All services end, and others begin where the last snapshot was taken."""
        if self.snapshot_of is None:
            self.snapshot(data)
        self.ended += [held.rows for held in self.leases.values()]
        self.leases.clear()
        self.world.close()
        self.world = World(own=self.shards == 1 and data.draw(st.booleans()), shards=self.shards)
        self.units = [self.world.unit() for _ in range(data.draw(st.integers(1, 3)))]
        self.world.plane().restore(self.file)
        self.partition = self.world.plane().partition("phase")
        self.groups, self.lost, self.acknowledged, self.attempts = deepcopy(self.snapshot_of)
        for number, group in self.groups.items():
            group.held.clear()
            for row, member in enumerate(group.rows, number * self.size):
                member.units = {} if group.gone else {name: self.unit_of(row, name) for name in member.values}

    # ------------------------------------------------------------ always

    @invariant()
    def stats_agree(self) -> None:
        if not hasattr(self, "groups"):
            return
        stats = self.partition.stats()
        rows = [row for group in self.groups.values() if not group.gone for row in group.rows]
        assert stats.rows == sum(bool(row.values) for row in rows)
        assert stats.nbytes == sum(array.nbytes for row in rows for array in row.values.values())
        assert stats.leases == sum(len(held.rows.parts) or 1 for held in self.leases.values())
        assert stats.ready == {consumer: len(self.ready(consumer)) for consumer in READS}

    @invariant()
    def units_keep_what_is_here_and_nothing_else(self) -> None:
        """Of a group that was lost or dropped, also what may still be read under a lease."""
        if not hasattr(self, "groups"):
            return
        self.world.settle()
        for unit, storage in self.world.storages.items():
            here = self.cells(unit)
            assert all(self.there(storage, row, name) for row, name in here)
            assert storage.stats().nbytes == self.nbytes_of(here)

    def drain(self, data: st.DataObject) -> None:
        """Each consumer has then acknowledged each complete group, or row, exactly once, unless the group was given up;
        once at most, when it is done with what has a column."""
        for lease in sorted(self.leases):
            self.partition.release(self.leases[lease].rows)
            self.end(lease, done=False)
        for consumer in READS:
            while ready := self.ready(consumer):
                rows = self.partition.lease(consumer, 5, at_least=1, deadline=AT_ONCE)
                given = self.ids(rows)
                assert set(given) <= set(ready)
                self.hold(rows, given, self.now)
                self.partition.acknowledge(rows)
                self.end(rows.lease, done=True)
        for number, group in self.groups.items():
            for consumer, member in self.everybody:
                once = self.acknowledged[consumer, number if member == ALL else number * self.size + member]
                certain = group.complete(member, READS[consumer]) and consumer not in self.writes
                assert once == 1 if certain and group.gone in ("", "done") else once <= 1

    def hold(self, rows: Rows, given: list[int], deadline: float) -> None:
        step = 1 if rows.consumer in self.by_row else self.size
        for id, attempts in zip(given, rows.attempts[::step].tolist(), strict=True):
            group, key = self.place(rows.consumer, id)
            group.held[key] = rows.lease
            self.attempts[rows.consumer, id] += 1
            assert attempts == self.attempts[rows.consumer, id]
        self.leases[rows.lease] = Held(rows, given, deadline)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()
            self.directory.cleanup()


PlaneMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=60,
    phases=[Phase.generate, Phase.shrink],  # to explain a failure as well takes minutes
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestPlaneAgreesWithAPlainModel = PlaneMachine.TestCase
