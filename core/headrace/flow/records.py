"""What goes into and comes out of the flow's façade: plain values, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from headrace.contract import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowColumns:
    """What rows are made of. ``first``: written when a trajectory is finished; ``consumers``: name → the columns it
    reads, ``train`` among them, which reads the last one to be written; ``writes``: consumer → the columns it adds;
    ``by_row``: consumers that are given rows one by one, ahead of their group."""

    all: tuple[str, ...]
    first: tuple[str, ...]
    consumers: Mapping[str, tuple[str, ...]]
    writes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    by_row: tuple[str, ...] = ()


ROW = FlowColumns(all=("row",), first=("row",), consumers={"train": ("row",)})
"""Where nobody asks for parts of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A group may start."""

    group: int
    version: int
    """The policy version that must sample every token of every member."""
    trajectories: tuple[int, ...]
    instances: tuple[str, ...]
    """Parallel to ``trajectories``. ``""``: nothing is rolled out in this phase; or, in lockstep after an instance was
    lost in the middle of a cohort, this member is in :meth:`Flow.unplaced` and needs :meth:`Flow.place_again`."""
    cohort: int | None
    """Lockstep only: the first of the groups that this one is decoded together with."""
    cohort_sizes: Mapping[str, int]
    """Lockstep: how many trajectories of this cohort each instance gets in all, as fixed when the cohort began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """What an instance should do now: retire first, then load."""

    instance: str
    load: int | None
    retire: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """An unfinished trajectory should go on on another instance, under the same version."""

    trajectory: int
    version: int
    source: str
    target: str
    with_state: bool
    """Whether both can hand over the state of a request; else ``target`` computes its tokens so far once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLease:
    """A training batch, held until ``deadline`` (the caller's clock)."""

    lease: int
    version: int
    """The version the batch is trained at."""
    groups: tuple[int, ...]
    """Ascending."""
    rows: tuple[int, ...]
    """Ascending: ``group_size`` rows of each group."""
    tokens: tuple[int, ...]
    """Parallel to ``rows``."""
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Trajectories since the flow began: ``dispatched = trained + buffered + in_flight + sum(dropped)``, always."""

    dispatched: int
    trained: int
    buffered: int
    """Stored and not yet trained; a leased row is buffered until its batch is acknowledged."""
    in_flight: int
    dropped: Mapping[str, int]
    """By reason."""
    refused: Mapping[str, int]
    """Writes that were turned away, by kind: ``duplicate``, ``late`` (the group was trained or dropped), ``unknown``
    (never dispatched by this flow). They are no trajectories of their own and stand outside the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A group whose rows are all stored, if not with every column, and not yet trained."""

    group: int
    version: int
    """The version it started under."""
    oldest: int
    """The version of its oldest token."""
    tokens: tuple[int, ...]
    """Per row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LedgerState:
    """A ledger at one moment, but for where values are and how large, and for who holds what: a lease that is out is
    none here. Arrays have an entry for each open group that somebody is not done with."""

    next_group: int
    reserved: Array
    """int64: groups to be opened before any new one, ascending."""
    groups: Array
    """int64 [g], ascending."""
    opened: Array
    """int64 [g]: versions they were opened under."""
    oldest: Array
    """int64 [g]: versions of their oldest tokens."""
    written: Array
    """int64 [g, group_size]: bit masks of columns that are stored."""
    tokens: Array
    """int32 [g, group_size]."""
    done: Array
    """bool [g, consumers]: which of those that are given groups are done with them."""
    attempts: Array
    """int16 [g, consumers]: how often each has leased them."""
    row_done: Array
    """bool [g, group_size, by_row]: which of those that are given rows are done with them."""
    row_attempts: Array
    """int16 [g, group_size, by_row]."""

    @property
    def first_group(self) -> int:
        """The lowest id that is outstanding."""
        first: int = min([self.next_group, *self.reserved[:1].tolist(), *self.groups[:1].tolist()])
        return first


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowState:
    """A flow between two batches, as a checkpoint keeps it. Tokens that were on their way are not in it: their groups
    start anew, under the version that is newest then. Of stored groups it has the first columns; others are added
    anew."""

    version: int
    next_group: int
    stored: tuple[StoredGroup, ...]
    unfinished: tuple[int, ...]
    """Groups to start anew, ascending, before any new one."""
    trained: int
    """Trajectories, as in :class:`Counts`."""
    dropped: Mapping[str, int]

    @property
    def first_group(self) -> int:
        """The lowest id that is outstanding."""
        return min([self.next_group, *self.unfinished, *(group.group for group in self.stored)])

    def ledger(self, *, group_size: int, columns: FlowColumns) -> LedgerState:
        """Where the first columns of the stored rows are there, and no consumer has seen any."""
        count, by_row = len(self.stored), len(columns.by_row)
        per_group, per_row = (count, len(columns.consumers) - by_row), (count, group_size)
        first = sum(1 << place for place, column in enumerate(columns.all) if column in columns.first)
        return LedgerState(
            next_group=self.next_group,
            reserved=np.array(self.unfinished, dtype=np.int64),
            groups=np.array([stored.group for stored in self.stored], dtype=np.int64),
            opened=np.array([stored.version for stored in self.stored], dtype=np.int64),
            oldest=np.array([stored.oldest for stored in self.stored], dtype=np.int64),
            written=np.full(per_row, first, dtype=np.int64),
            tokens=np.array([stored.tokens for stored in self.stored], dtype=np.int32).reshape(per_row),
            done=np.zeros(per_group, dtype=np.bool_),
            attempts=np.zeros(per_group, dtype=np.int16),
            row_done=np.zeros((*per_row, by_row), dtype=np.bool_),
            row_attempts=np.zeros((*per_row, by_row), dtype=np.int16),
        )
