"""Random puts, gets and deletes, for storages that are to behave like a dictionary."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.contract import Array, Batch, Column, Ragged, Storage

SOME_ROWS = st.builds(
    lambda start, count, step: range(start, start + count, step), *[st.integers(1, 150)] * 2, st.integers(1, 3)
)


class Storing(RuleBasedStateMachine):
    """A storage against a dictionary of (row, column); subclasses say which. ``scale``: of the ragged lengths."""

    scale = 1

    def __init__(self) -> None:
        super().__init__()
        self.storage = self.make()
        self.model: dict[str, dict[int, Array]] = {"tokens": {}, "reward": {}}
        self.counter = 0

    def make(self) -> Storage:
        """An empty storage."""
        raise NotImplementedError

    def teardown(self) -> None:
        self.storage.close()

    @rule(rows=SOME_ROWS, names=st.sampled_from([["tokens"], ["reward"], ["reward", "tokens"], []]))
    def put(self, rows: range, names: list[str]) -> None:
        order = list(rows)
        columns: dict[str, Column] = {}
        for name in names:
            self.counter += 1
            values = [np.full((self.counter + row) % 5 * self.scale, row + self.counter, np.int32) for row in order]
            if name == "tokens":
                columns[name] = Ragged.from_arrays(values, dtype=np.int32)
            else:
                values = [np.array(self.counter + row, np.int32) for row in order]
                columns[name] = np.array([self.counter + row for row in order], np.int32)
            self.model[name].update(zip(order, values, strict=True))
        self.storage.put(Batch(rows=np.array(order, np.int64), columns=columns))

    @rule(rows=SOME_ROWS)
    def delete(self, rows: range) -> None:
        self.storage.delete(list(rows))
        for column in self.model.values():
            for row in rows:
                column.pop(row, None)

    @rule(backwards=st.booleans())
    def get(self, backwards: bool) -> None:
        for name, column in self.model.items():
            if column:
                rows = sorted(column, reverse=backwards)
                got = self.storage.get(rows, [name]).columns[name]
                assert [a.tolist() for a in got] == [column[row].tolist() for row in rows]

    @invariant()
    def counts(self) -> None:
        stats = self.storage.stats()
        assert stats.rows == len(set(self.model["tokens"]) | set(self.model["reward"]))
        assert stats.nbytes == sum(a.nbytes for column in self.model.values() for a in column.values())
