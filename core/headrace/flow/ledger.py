"""Rows × columns × consumers: what is stored where, who may read it, who has it on lease.

A group of ``group_size`` rows is *ready* for a consumer when every member has all columns the consumer reads. A
consumer leases whole groups, oldest version first, then those that were ready first; a lease is acknowledged,
released, or expires, and in the last two cases its groups are ready again, before others. A group leaves the ledger
when every consumer is done with it, or when it is dropped.

A consumer that writes columns is done with a group once they are there, whoever wrote them and whatever becomes of its
lease. One that works *by row* is given rows as they become ready, whole groups or not.

Columnar numpy arrays inside, no Python object per row; every operation is O(its own rows), never O(outstanding).
Invariant: each consumer is given each group once at a time, complete, and acknowledges it at most once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from headrace.balance import most_within
from headrace.contract import Array
from headrace.flow.consumers import DONE, LEASED, READY, Consumer, ConsumerTable
from headrace.flow.group_table import DUPLICATE, LATE, STORED, UNKNOWN, total
from headrace.flow.leases import Lease, Leases


class Ledger(ConsumerTable):
    """``columns``: all there are; ``consumers``: name → the columns it reads; ``writes``: name → those it adds;
    ``by_row``: consumers that are given rows."""

    def __init__(
        self,
        *,
        group_size: int,
        columns: Sequence[str],
        consumers: Mapping[str, Collection[str]],
        writes: Mapping[str, Collection[str]] = MappingProxyType({}),
        by_row: Collection[str] = (),
        first_group: int = 0,
    ) -> None:
        super().__init__(
            group_size=group_size,
            columns=columns,
            consumers=consumers,
            writes=writes,
            by_row=by_row,
            first_group=first_group,
        )
        self.leases = Leases()

    # ------------------------------------------------------------ groups

    def drop(self, group: int) -> int:
        """An open group leaves, also one on lease, which whoever has it may acknowledge or release still; returns how
        many of its rows were stored."""
        stored = int(np.count_nonzero(self._groups.get("written", group)))
        self._discard(group)
        return stored

    def _discard(self, group: int) -> None:
        for consumer in self._consumers.values():
            self._finish(consumer, self.rows_of(np.array([group])) if consumer.by_row else np.array([group]))
        self._leave(np.array([group]))

    def lose(self, unit: int) -> Array:
        """A storage unit is gone: the groups :meth:`at_unit` leave; returns them."""
        return self.give_up(self.at_unit(unit))

    def give_up(self, groups: Array) -> Array:
        """Those of ``groups`` that are open leave, those on lease too; returns them."""
        present = self._open(groups[groups < self.next_group])
        for group in present.tolist():
            self._discard(group)
        return present

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
        like, ready, wanted = self._like(tuple(columns), version, unit)
        first, rows = self._groups.append(groups, like), groups * self.group_size
        start = (first - self._groups.base) * self.group_size
        added = total(nbytes, rows)
        at: int | slice = slice(start, start + rows)
        if rows == 1:
            at, nbytes, tokens = start, added, total(tokens, 1)
        self._groups.members["nbytes"][at] = nbytes
        self._groups.members["tokens"][at] = tokens
        self.buffered += rows
        self.nbytes += added
        for consumer in ready:
            scale = self.group_size if consumer.by_row else 1
            consumer.ready.add_range(version, first * scale, groups * scale)
        if not wanted:
            self._leave_by_writing(np.arange(first, first + groups))
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
                if consumer.by_row or consumer.writes:
                    self._complete_rows(consumer, np.array([row]))
                    continue
                complete = table["complete"][slot]
                complete[consumer.index] += 1
                if complete[consumer.index] == self.group_size:
                    table["state"][slot, consumer.index] = READY
                    consumer.ready.push(int(oldest[slot]), group)
        self._finished(np.array([row]), np.array([old]), np.array([new]))
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
        self.nbytes += total(nbytes, len(rows))
        self._row_column("units")[slots[:, None], self._places(columns)] = unit
        fresh = old == 0
        if fresh.any():
            self.buffered += int(np.count_nonzero(fresh))
            self._note_versions(groups[fresh], None if versions is None else versions[fresh])
        for consumer in self._consumers.values():
            reads = consumer.reads
            completed = (old & reads != reads) & (new & reads == reads)
            if completed.any():
                self._complete_rows(consumer, rows[completed])
        self._finished(rows, old, new)

    def _note_versions(self, groups: Array, versions: Array | None) -> None:
        slots = self._groups.slots(groups)
        if versions is None:
            versions = self._groups.columns["opened"][slots]
        np.minimum.at(self._groups.columns["oldest"], slots, versions)

    # ------------------------------------------------------------ consumers

    def ready(self, consumer: str) -> dict[int, int]:
        """Groups that ``consumer`` could lease, by the version of their oldest token, or rows, by the version
        that their group started under; a copy."""
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
        strict: bool = False,
        chosen: Array | None = None,
    ) -> Lease | None:
        """Up to ``groups`` ready groups, the oldest first; None when there are fewer than ``at_least`` (default:
        ``groups``). ``token_budget``: stop before the group that would pass it, unless it is the first and not
        ``strict``. ``min_version``: leave out those that are older. ``ranks``: that share them, each within
        ``token_budget``; see :class:`~headrace.flow.shares.Shares`. ``chosen``: int64 [n], take only those of these, in
        their order. For a consumer that works by row, all this is about rows."""
        who, at_least = self._consumers[consumer], groups if at_least is None else at_least
        there = None if chosen is None else self._still_ready(consumer, chosen, min_version)
        if (who.ready.count(min_version=min_version) if there is None else len(there)) < at_least:
            return None
        ids = who.ready.take(groups, min_version=min_version) if there is None else there[:groups]
        if not len(ids):
            return None
        if token_budget is not None or ranks > 1:
            kept = self._shareable(who, ids, groups, token_budget, ranks, strict)
            ids, rest = ids[:kept], ids[kept:]
            if there is None:
                who.ready.add(rest, self._versions_of(who, rest), again=True)
            if not kept:
                return None
        if there is not None:
            who.ready.remove(ids, self._versions_of(who, ids))
        at = self._row_slots(ids) if who.by_row else self._at(ids)
        self._states(who)[at] = LEASED
        self._attempts(who)[at] += 1
        if who.by_row:
            return self.leases.grant(consumer, np.unique(ids // self.group_size), deadline, rows=ids)
        return self.leases.grant(consumer, ids, deadline)

    def became_ready(self, consumer: str) -> int:
        """How often something became ready for ``consumer``; what it gave back counts again."""
        return self._consumers[consumer].ready.ever

    def candidates(self, consumer: str, *, min_version: int | None = None) -> Array:
        """int64 [3, n], of what :meth:`lease` could give, in its order: ids of groups, or rows, the versions that they
        are ordered by, and their tokens. O(n)."""
        who = self._consumers[consumer]
        ids = who.ready.all(min_version=min_version)
        tokens = self.tokens_of(ids) if who.by_row else np.array(self.group_tokens(ids), dtype=np.int64)
        return np.stack([ids, self._versions_of(who, ids), tokens])

    def _still_ready(self, consumer: str, chosen: Array, min_version: int | None) -> Array:
        """Those of ``chosen``, each once, that :meth:`lease` could give."""
        who = self._consumers[consumer]
        _, first = np.unique(chosen, return_index=True)
        ids = chosen[np.sort(first)]
        ids = ids[(ids >= 0) & (ids < self.next_group * (self.group_size if who.by_row else 1))]
        ids = ids[self._are_ready(consumer, ids)]
        return ids if min_version is None else ids[self._versions_of(who, ids) >= min_version]

    def _shareable(
        self, who: Consumer, chosen: Array, groups: int, token_budget: int | None, ranks: int, strict: bool
    ) -> int:
        """How many of ``chosen`` stay within the budget, at least one a rank, or if ``strict`` none; of ``groups``
        either none are left then, or enough for each rank to get one."""
        kept = len(chosen)
        if token_budget is not None:
            tokens: list[int] = self.tokens_of(chosen).tolist() if who.by_row else self.group_tokens(chosen)
            kept = 0 if strict and tokens[0] > token_budget else most_within(tokens, token_budget, ranks)
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
        who = self._consumers[lease.consumer]
        if lease.rows is not None:
            attempts = self._attempts(who)[self._row_slots(lease.rows)]
            return np.stack([lease.rows, self.tokens_of(lease.rows), attempts]), self.units_of(lease.rows)
        at, size, columns = self._at(lease.groups), self.group_size, self._groups.columns
        table = np.empty((3, len(lease.groups), size), dtype=np.int64)
        table[0] = self.rows_of(lease.groups).reshape(-1, size)
        table[1] = columns["tokens"][at]
        table[2] = self._attempts(who)[at].reshape(-1, 1)
        units = columns["units"][at]
        return table.reshape(3, -1), units.reshape(-1, units.shape[-1])

    def extend(self, lease: int, *, deadline: float) -> None:
        """Hold on to a lease until ``deadline``."""
        self.leases.extend(lease, deadline)

    def release(self, lease: int) -> Lease:
        """Give the groups back: ready again, but for those that have what the consumer writes."""
        held = self.leases.end(lease)
        who, ids = self._consumers[held.consumer], self._present(held)
        self._make_ready(who, ids[self._states(who)[self._slots(who, ids)] == LEASED], again=True)
        return held

    def expire(self, now: float) -> tuple[Lease, ...]:
        """Release the leases whose deadline has come; what the first of them held is the first to be leased again."""
        due = tuple(dict.fromkeys(self.leases.due(now)))
        return tuple(self.release(lease) for lease in reversed(due))[::-1]

    def acknowledge(self, lease: int) -> tuple[Lease, Array]:
        """The consumer is done with the groups. Returns also those that every consumer is done with: they left."""
        held = self.leases.end(lease)
        who, ids = self._consumers[held.consumer], self._present(held)
        self._states(who)[self._slots(who, ids)] = DONE
        return held, self._leave_unwanted(ids if held.rows is None else self._open(held.groups))

    def _open(self, groups: Array) -> Array:
        groups = groups[groups >= self._groups.low]
        present: Array = groups[self._column_of("open", groups)]
        return present

    def _present(self, held: Lease) -> Array:
        """What it holds, groups or rows, without what was lost on lease."""
        if held.rows is None:
            return self._open(held.groups)
        rows = held.rows[held.rows >= self._groups.low * self.group_size]
        present: Array = rows[self._column_of("open", rows // self.group_size)]
        return present
