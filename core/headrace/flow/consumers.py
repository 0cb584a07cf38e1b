"""What each consumer may have of groups, has on lease, or is done with.

A consumer is given whole groups, or, working *by row*, rows as they become ready. Every operation is O(its own rows).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from headrace.contract import Array
from headrace.flow.group_table import GroupTable
from headrace.flow.ready import ReadyGroups
from headrace.flow.records import LedgerState
from headrace.flow.table import Fresh

_PENDING, READY, LEASED, DONE = range(4)
_KEPT = ("opened", "oldest", "written", "tokens", "attempts", "row_attempts")
"""Columns that another ledger continues with as they are."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """Who is given groups, or rows."""

    index: int
    """Among those that are given groups, or among those that are given rows."""
    reads: int
    writes: int
    """Bit masks of columns."""
    by_row: bool
    ready: ReadyGroups


class ConsumerTable(GroupTable):
    """``consumers``: name → the columns it reads; ``writes``: name → those it adds; ``by_row``: consumers that are
    given rows. Below, *ids* are of groups, or of rows, as the consumer is given them."""

    def __init__(
        self,
        *,
        group_size: int,
        columns: Sequence[str],
        consumers: Mapping[str, Collection[str]],
        writes: Mapping[str, Collection[str]],
        by_row: Collection[str],
        first_group: int,
    ) -> None:
        super().__init__(
            group_size=group_size,
            columns=columns,
            consumers=len(consumers) - len(by_row),
            by_row=len(by_row),
            first_group=first_group,
        )
        self._consumers: dict[str, Consumer] = {}
        self._left: list[int] = []
        for rows in (False, True):
            for index, name in enumerate(name for name in consumers if (name in by_row) == rows):
                reads, adds = self._mask(consumers[name]), self._mask(writes.get(name, ()))
                ready = ReadyGroups(partial(self._are_ready, name))
                self._consumers[name] = Consumer(index, reads, adds, rows, ready)
        self._like = lru_cache(maxsize=64)(self._stored_at_once)

    def _stored_at_once(self, columns: tuple[str, ...], version: int, unit: int) -> tuple[Fresh, list[Consumer], bool]:
        """New groups whose rows have these columns, in ``unit``; who is given them; whether anybody wants anything of
        them."""
        added, ready, wanted = self._mask(columns), [], False
        units = np.zeros(len(self._bits), dtype=np.int16)
        units[self._places(columns)] = unit
        states = {rows: np.zeros(len(self._consumers), dtype=np.int8) for rows in (False, True)}
        for consumer in self._consumers.values():
            if consumer.writes and consumer.writes & added == consumer.writes:
                states[consumer.by_row][consumer.index] = DONE
                continue
            wanted = True
            if consumer.reads & added == consumer.reads:
                states[consumer.by_row][consumer.index] = READY
                ready.append(consumer)
        by_row = sum(consumer.by_row for consumer in self._consumers.values())
        like = self._groups.fresh(
            opened=version,
            oldest=version,
            open=True,
            written=added,
            units=units,
            state=states[False][: len(self._consumers) - by_row],
            row_state=states[True][:by_row],
        )
        return like, ready, wanted

    def _complete_rows(self, consumer: Consumer, rows: Array) -> None:
        """They have all that the consumer reads now."""
        ids = rows if consumer.by_row else self._complete_groups(consumer, rows // self.group_size)
        if consumer.writes:  # which may be there already
            ids = ids[self._states(consumer)[self._slots(consumer, ids)] != DONE]
        self._make_ready(consumer, ids)

    def _complete_groups(self, consumer: Consumer, groups: Array) -> Array:
        """``groups``: of rows that are complete now. Returns those that are now complete themselves."""
        if self.group_size == 1:
            return groups
        complete = self._groups.columns["complete"][:, consumer.index]
        np.add.at(complete, self._groups.slots(groups), 1)
        groups = np.unique(groups)
        whole: Array = groups[complete[self._groups.slots(groups)] == self.group_size]
        return whole

    def _finished(self, rows: Array, old: Array, new: Array) -> None:
        """``old``, ``new``: masks of the columns that rows had, and have now."""
        some = False
        for consumer in self._consumers.values():
            if writes := consumer.writes:
                finished = rows[(old & writes != writes) & (new & writes == writes)]
                if len(finished):
                    self._finish_rows(consumer, finished)
                    some = True
        if some:
            self._leave_by_writing(np.unique(rows // self.group_size))

    def _finish_rows(self, consumer: Consumer, rows: Array) -> None:
        """They have all that the consumer writes now."""
        if consumer.by_row:
            self._finish(consumer, rows)
            return
        groups = np.unique(rows // self.group_size)
        written = self._column_of("written", groups) & consumer.writes
        self._finish(consumer, groups[(written == consumer.writes).all(axis=1)])

    def _finish(self, consumer: Consumer, ids: Array) -> None:
        """The consumer is done with groups, or rows, wherever they are."""
        states, slots = self._states(consumer), self._slots(consumer, ids)
        for version in self._versions_of(consumer, ids[states[slots] == READY]).tolist():
            consumer.ready.discard(version)
        states[slots] = DONE

    def _states(self, who: Consumer) -> Array:
        """Of groups, or of rows, by slot; a view."""
        return self._groups.part("row_state" if who.by_row else "state", who.index)

    def _attempts(self, who: Consumer) -> Array:
        return self._groups.part("row_attempts" if who.by_row else "attempts", who.index)

    def _slots(self, who: Consumer, ids: Array) -> Array:
        return self._row_slots(ids) if who.by_row else self._groups.slots(ids)

    def _versions_of(self, who: Consumer, ids: Array) -> Array:
        """What they are ordered by. A row's place must not depend on members that come later."""
        return self._column_of("opened", ids // self.group_size) if who.by_row else self._column_of("oldest", ids)

    def _are_ready(self, consumer: str, ids: Array) -> Array:
        # A group that left may be forgotten by now, and its slot be another's.
        who = self._consumers[consumer]
        scale = self.group_size if who.by_row else 1
        known = ids >= self._groups.low * scale
        state = self._states(who)[self._slots(who, np.where(known, ids, self._groups.base * scale))]
        ready: Array = known & (state == READY)
        return ready

    def _make_ready(self, who: Consumer, ids: Array, *, again: bool = False) -> None:
        self._states(who)[self._slots(who, ids)] = READY
        who.ready.add(ids, self._versions_of(who, ids), again=again)

    # ------------------------------------------------------------ an earlier ledger

    def state(self) -> LedgerState:
        """This moment. O(groups since the oldest open one)."""
        groups = np.arange(self._groups.low, self._groups.end)
        groups = groups[self._column_of("open", groups)]
        return LedgerState(
            next_group=self.next_group,
            reserved=np.array(self.reserved, dtype=np.int64),
            groups=groups,
            done=self._column_of("state", groups) == DONE,
            row_done=self._column_of("row_state", groups) == DONE,
            **{name: self._column_of(name, groups) for name in _KEPT},
        )

    def restore(self, state: LedgerState) -> None:
        """Continue an earlier ledger, in an empty one. Its values are :attr:`awaited` in storage units."""
        self._begin_at(state.first_group, state.next_group)
        self._reserved.extend(state.reserved.tolist())
        columns, slots = self._groups.columns, self._groups.slots(state.groups)
        columns["reserved"][self._groups.slots(state.reserved)] = True
        columns["open"][slots] = True
        for name in _KEPT:
            columns[name][slots] = getattr(state, name)
        columns["state"][slots] = np.where(state.done, DONE, _PENDING)
        columns["row_state"][slots] = np.where(state.row_done, DONE, _PENDING)
        self.buffered = int(np.count_nonzero(state.written))
        self.awaited = self._awaited_of(state.groups)
        for consumer in self._consumers.values():
            there = (state.written & consumer.reads) == consumer.reads
            if not consumer.by_row:
                columns["complete"][slots, consumer.index] = there.sum(axis=1)
                there = there.all(axis=1)
            done = (state.row_done if consumer.by_row else state.done)[..., consumer.index]
            ids = self.rows_of(state.groups).reshape(there.shape) if consumer.by_row else state.groups
            self._make_ready(consumer, ids[there & ~done])

    # ------------------------------------------------------------ groups that leave

    def take_left(self) -> Array:
        """Groups that left since this was asked last because what a consumer writes was there, which was the last to
        want them."""
        left, self._left = np.array(self._left, dtype=np.int64), []
        return left

    def _leave_by_writing(self, groups: Array) -> None:
        self._left += self._leave_unwanted(groups).tolist()

    def _leave_unwanted(self, groups: Array) -> Array:
        """Those of open groups leave of which no consumer wants anything any more; returns them."""
        done = (self._column_of("state", groups) == DONE).all(axis=1)
        if any(consumer.by_row for consumer in self._consumers.values()):
            done &= (self._column_of("row_state", groups) == DONE).all(axis=(1, 2))
        left: Array = groups[done]
        self._leave(left)
        return left
