"""Rows × columns × consumers: what is stored where, who may read it, who has it on lease.

A group of ``group_size`` rows is *ready* for a consumer when every member has all columns the consumer reads. A
consumer leases whole groups, oldest version first, then those that were ready first; a lease is acknowledged,
released, or expires, and in the last two cases its groups are ready again, before others. A group leaves the ledger
when every consumer has acknowledged it, or when it is dropped.

Columnar numpy arrays inside, no Python object per row; every operation is O(its own rows), never O(outstanding).
Invariant: each consumer is given each group once at a time, complete, and acknowledges it at most once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from headrace.contract import Array
from headrace.flow.balance import most_within
from headrace.flow.group_table import DUPLICATE, LATE, STORED, UNKNOWN, GroupTable, total
from headrace.flow.leases import Lease, Leases
from headrace.flow.ready import ReadyGroups
from headrace.flow.records import BatchLease, FlowState, StoredGroup

_PENDING, _READY, _LEASED, _DONE = range(4)


@dataclass(frozen=True, slots=True)
class _Consumer:
    index: int
    reads: int
    """Bit mask of columns."""
    ready: ReadyGroups


class Ledger(GroupTable):
    """``columns``: all there are; ``consumers``: name → the columns it reads. ``nbytes``, ``buffered``: bytes and rows
    stored in groups that have not left."""

    def __init__(
        self,
        *,
        group_size: int,
        columns: Sequence[str],
        consumers: Mapping[str, Collection[str]],
        first_group: int = 0,
    ) -> None:
        super().__init__(group_size=group_size, columns=columns, consumers=len(consumers), first_group=first_group)
        self.nbytes = 0
        self.buffered = 0
        self.leases = Leases()
        self._consumers = {
            name: _Consumer(index, self._mask(reads), ReadyGroups(partial(self._are_ready, index)))
            for index, (name, reads) in enumerate(consumers.items())
        }

    # ------------------------------------------------------------ groups

    def drop(self, group: int) -> int:
        """An open group leaves, also one on lease, which whoever has it may acknowledge or release still; returns how
        many of its rows were stored."""
        stored = int(np.count_nonzero(self._groups.get("written", group)))
        self._discard(group)
        return stored

    def at_unit(self, unit: int) -> Array:
        """Open groups with a column in a storage unit, ascending. O(groups since the oldest open one)."""
        groups = np.arange(self._groups.low, self._groups.end)
        there = (self._column_of("units", groups) == unit).any(axis=(1, 2))
        found: Array = groups[there & self._column_of("open", groups)]
        return found

    def _discard(self, group: int) -> None:
        states = self._groups.get("state", group)
        for consumer in self._consumers.values():
            if states[consumer.index] == _READY:
                consumer.ready.discard(int(self._groups.get("oldest", group)))
        states[:] = _DONE
        self._leave(np.array([group]))

    def lose(self, unit: int) -> Array:
        """A storage unit is gone: the groups :meth:`at_unit` leave; returns them."""
        return self.give_up(self.at_unit(unit))

    def give_up(self, groups: Array) -> Array:
        """Those of ``groups`` that are open leave, those on lease too; returns them."""
        present = self._present(groups)
        for group in present.tolist():
            self._discard(group)
        return present

    # ------------------------------------------------------------ an earlier run

    def restore(self, state: FlowState) -> None:
        """Continue an earlier ledger, in an empty one that begins at ``state.first_group``."""
        stored = {group.group: group for group in state.stored}
        self._reserved.extend(sorted(state.unfinished))
        while self._groups.end < state.next_group:
            group = self._groups.append(1)
            if group in stored:
                self._restore_group(stored[group])
            elif group in self._reserved:
                self._groups.set("reserved", group, True)

    def _restore_group(self, stored: StoredGroup) -> None:
        self._begin(stored.group, 1, stored.version)
        rows = np.array(self.rows(stored.group))
        versions = np.full(len(rows), stored.oldest)
        self.write(rows, self._bits, nbytes=np.array(stored.nbytes), tokens=np.array(stored.tokens), versions=versions)

    def place(self, rows: Array, unit: int) -> None:
        """Values of rows that an earlier run had stored are in ``unit`` now."""
        self._row_column("units")[self._row_slots(rows)] = unit

    # ------------------------------------------------------------ rows

    def insert(
        self,
        groups: int,
        version: int,
        columns: Collection[str],
        *,
        nbytes: Array | int,
        tokens: Array | int = 0,
        unit: int = 0,
    ) -> int:
        """Groups with consecutive new ids, whose rows get columns at once: :meth:`open_many` and :meth:`write` in one,
        for a fraction of their cost. Returns the first."""
        first, added = self._groups.append(groups), self._mask(columns)
        slots, shape = self._begin(first, groups, version, oldest=version), (groups, self.group_size)
        table = self._groups.columns
        table["written"][slots] = added
        table["nbytes"][slots] = nbytes.reshape(shape) if isinstance(nbytes, np.ndarray) else nbytes
        if isinstance(tokens, np.ndarray):
            table["tokens"][slots] = tokens.reshape(shape)
        elif tokens:  # a fresh record has none
            table["tokens"][slots] = tokens
        if added == self._all:
            table["units"][slots] = unit
        else:
            table["units"][slots, :, self._places(columns)] = unit
        self.buffered += groups * self.group_size
        self.nbytes += (
            int(np.add.reduce(nbytes)) if isinstance(nbytes, np.ndarray) else nbytes * groups * self.group_size
        )
        for consumer in self._consumers.values():
            if consumer.reads & added == consumer.reads:
                table["state"][slots, consumer.index] = _READY
                consumer.ready.add_of(version, np.arange(first, first + groups))
        return first

    def write(
        self,
        rows: Array,
        columns: Collection[str],
        *,
        nbytes: Array | int,
        tokens: Array | int = 0,
        versions: Array | None = None,
        unit: int = 0,
    ) -> Array:
        """Columns of different rows (int64 [n]) are stored in ``unit``. ``nbytes``, ``tokens``: int [n], what they add
        to a row; ``versions``: int64 [n], of each row's oldest token (default: its group's), said with a row's first
        columns. Returns int8 [n]: ``STORED`` or why not."""
        outcome = self._refusals(rows, self._mask(columns))
        stored = outcome == STORED
        if stored.all():
            self._write(rows, columns, nbytes, tokens, versions, unit)
        elif stored.any():
            self._write(
                rows[stored],
                columns,
                nbytes if isinstance(nbytes, int) else nbytes[stored],
                tokens if isinstance(tokens, int) else tokens[stored],
                None if versions is None else versions[stored],
                unit,
            )
        return outcome

    def write_row(
        self, row: int, columns: Collection[str], *, nbytes: int, tokens: int = 0, version: int, unit: int = 0
    ) -> int:
        """:meth:`write` of one row, for a fraction of its cost; returns what became of it."""
        groups, (group, member), added = self._groups, divmod(row, self.group_size), self._mask(columns)
        if group not in groups:
            return LATE if self._first_group <= group < groups.low else UNKNOWN
        slot, table = group - groups.base, groups.columns
        if not table["open"][slot]:
            return LATE
        written = table["written"][slot]
        old = int(written[member])
        if old & added:
            return DUPLICATE
        written[member] = new = old | added
        table["tokens"][slot, member] += tokens
        table["nbytes"][slot, member] += nbytes
        self.nbytes += nbytes
        units = table["units"][slot, member]
        for place in self._places(columns):
            units[place] = unit
        oldest = table["oldest"]
        if not old:
            self.buffered += 1
            if version < oldest[slot]:
                oldest[slot] = version
        for consumer in self._consumers.values():
            if old & consumer.reads != consumer.reads == new & consumer.reads:
                complete = table["complete"][slot]
                complete[consumer.index] += 1
                if complete[consumer.index] == self.group_size:
                    table["state"][slot, consumer.index] = _READY
                    consumer.ready.push(int(oldest[slot]), group)
        return STORED

    def _write(
        self,
        rows: Array,
        columns: Collection[str],
        nbytes: Array | int,
        tokens: Array | int,
        versions: Array | None,
        unit: int,
    ) -> None:
        slots, groups, added = self._row_slots(rows), rows // self.group_size, self._mask(columns)
        written = self._row_column("written")
        old = written[slots]
        written[slots] = new = old | added
        self._row_column("tokens")[slots] += tokens
        self._row_column("nbytes")[slots] += nbytes
        self.nbytes += total(nbytes) if isinstance(nbytes, np.ndarray) else nbytes * len(rows)
        self._row_column("units")[slots[:, None], self._places(columns)] = unit
        fresh = old == 0
        if fresh.any():
            self.buffered += int(np.count_nonzero(fresh))
            self._note_versions(groups[fresh], None if versions is None else versions[fresh])
        for consumer in self._consumers.values():
            reads = consumer.reads
            completed = (old & reads != reads) & (new & reads == reads)
            if completed.any():
                self._complete_rows(consumer, groups[completed])

    def _note_versions(self, groups: Array, versions: Array | None) -> None:
        slots = self._groups.slots(groups)
        if versions is None:
            versions = self._groups.columns["opened"][slots]
        np.minimum.at(self._groups.columns["oldest"], slots, versions)

    def _complete_rows(self, consumer: _Consumer, groups: Array) -> None:
        if self.group_size > 1:
            complete = self._groups.columns["complete"][:, consumer.index]
            np.add.at(complete, self._groups.slots(groups), 1)
            groups = np.unique(groups)
            groups = groups[complete[self._groups.slots(groups)] == self.group_size]
        self._make_ready(consumer, groups)

    # ------------------------------------------------------------ consumers

    def ready(self, consumer: str) -> dict[int, int]:
        """Groups that ``consumer`` could lease, by the version of their oldest token; a copy."""
        return self._consumers[consumer].ready.by_version()

    def lease(
        self,
        consumer: str,
        groups: int,
        *,
        deadline: float,
        at_least: int | None = None,
        token_budget: int | None = None,
        min_version: int | None = None,
        ranks: int = 1,
    ) -> Lease | None:
        """Up to ``groups`` ready groups, the oldest first; None when there are fewer than ``at_least`` (default:
        ``groups``). ``token_budget``: stop before the group that would pass it, unless it is the first.
        ``min_version``: leave out those that are older. ``ranks``: that share them, each within ``token_budget``; see
        :class:`~headrace.flow.shares.Shares`."""
        who = self._consumers[consumer]
        if who.ready.count(min_version=min_version) < (groups if at_least is None else at_least):
            return None
        chosen = who.ready.take(groups, min_version=min_version)
        if not len(chosen):
            return None
        if token_budget is not None or ranks > 1:
            kept = self._shareable(chosen, groups, token_budget, ranks)
            chosen, rest = chosen[:kept], chosen[kept:]
            who.ready.add(rest, self._column_of("oldest", rest), again=True)
        at = self._at(chosen)
        self._groups.columns["state"][at, who.index] = _LEASED
        self._groups.columns["attempts"][at, who.index] += 1
        return self.leases.grant(consumer, chosen, deadline)

    def _shareable(self, chosen: Array, groups: int, token_budget: int | None, ranks: int) -> int:
        """How many of ``chosen`` stay within the budget, at least one a rank; of ``groups`` either none are left then,
        or enough for each rank to get one."""
        kept = len(chosen)
        if token_budget is not None:
            kept = most_within(self.group_tokens(chosen), token_budget, ranks)
        if 0 < groups - kept < ranks:
            return groups - ranks if groups >= 2 * ranks else len(chosen)
        return kept

    def group_tokens(self, groups: Array) -> list[int]:
        """Tokens of each group, all its rows together."""
        tokens: list[int] = self._column_of("tokens", groups).sum(axis=1).tolist()
        return tokens

    def oldest(self, groups: Array) -> list[int]:
        """The version of each group's oldest token."""
        oldest: list[int] = self._column_of("oldest", groups).tolist()
        return oldest

    def contents(self, lease: Lease) -> tuple[Array, Array]:
        """int64 [3, n]: ids of a lease's rows, their tokens, and how often each was leased by this consumer, this time
        included; int16 [n, columns]: which storage unit has each column, 0 where none has."""
        at, size, columns = self._at(lease.groups), self.group_size, self._groups.columns
        table = np.empty((3, len(lease.groups), size), dtype=np.int64)
        table[0] = self.rows_of(lease.groups).reshape(-1, size)
        table[1] = columns["tokens"][at]
        table[2] = columns["attempts"][at, self._consumers[lease.consumer].index][:, None]
        units = columns["units"][at]
        return table.reshape(3, -1), units.reshape(-1, units.shape[2])

    def extend(self, lease: int, *, deadline: float) -> None:
        """Hold on to a lease until ``deadline``."""
        self.leases.extend(lease, deadline)

    def release(self, lease: int) -> Lease:
        """Give the groups back: ready again."""
        held = self.leases.end(lease)
        self._make_ready(self._consumers[held.consumer], self._present(held.groups), again=True)
        return held

    def expire(self, now: float) -> tuple[Lease, ...]:
        """Release the leases whose deadline has come; what the first of them held is the first to be leased again."""
        due = tuple(dict.fromkeys(self.leases.due(now)))
        return tuple(self.release(lease) for lease in reversed(due))[::-1]

    def acknowledge(self, lease: int) -> tuple[Lease, Array]:
        """The consumer is done with the groups. Returns also those that every consumer is done with: they left."""
        held = self.leases.end(lease)
        groups = self._present(held.groups)
        slots = self._groups.slots(groups)
        states = self._groups.columns["state"]
        states[slots, self._consumers[held.consumer].index] = _DONE
        left: Array = groups[(states[slots] == _DONE).all(axis=1)]
        self._leave(left)
        return held, left

    def _present(self, groups: Array) -> Array:
        """Without those that were lost on lease."""
        groups = groups[groups >= self._groups.low]
        present: Array = groups[self._column_of("open", groups)]
        return present

    # ------------------------------------------------------------ inside

    def _are_ready(self, index: int, groups: Array) -> Array:
        # A group that left may be forgotten by now, and its slot be another's.
        known = groups >= self._groups.low
        state = self._groups.columns["state"][self._groups.slots(np.where(known, groups, self._groups.base)), index]
        ready: Array = known & (state == _READY)
        return ready

    def _make_ready(self, consumer: _Consumer, groups: Array, *, again: bool = False) -> None:
        self._groups.columns["state"][self._groups.slots(groups), consumer.index] = _READY
        consumer.ready.add(groups, self._column_of("oldest", groups), again=again)

    def _leave(self, groups: Array) -> None:
        slots = self._groups.slots(groups)
        self.buffered -= int(np.count_nonzero(self._groups.columns["written"][slots]))
        self.nbytes -= int(self._groups.columns["nbytes"][slots].sum())
        opened = self._groups.columns["open"]
        opened[slots] = False
        low = self._groups.low
        while low < self._groups.end and not opened[low - self._groups.base] and not self._groups.get("reserved", low):
            low += 1
        self._groups.forget(low)


def batch_lease(parts: Sequence[Lease], version: int, ledger: Ledger) -> BatchLease:
    """The groups of leases as the training batch of ``version``, known by the last of them."""
    groups = tuple(sorted(group for part in parts for group in part.groups.tolist()))
    return BatchLease(
        lease=parts[-1].lease,
        version=version,
        groups=groups,
        rows=tuple(row for group in groups for row in ledger.rows(group)),
        tokens=tuple(count for group in groups for count in ledger.tokens(group)),
        deadline=min(part.deadline for part in parts),
    )
