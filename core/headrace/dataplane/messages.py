"""What producers, consumers, units and the ledger say to each other; positional on the wire, for they are many."""

from __future__ import annotations

import msgspec

from headrace.contract import Array, Placed, Ragged, Region, Repeated
from headrace.flow import LedgerState
from headrace.wire.messages import Failure


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base."""


class ColumnSchema(Message, frozen=True):
    """What every value of a column looks like. ``dtype``: numpy's name; ``shape``: of one value, or of one entry of a
    ``ragged`` column, which has any number of entries per row; ``by_content``: a value that several rows have is sent
    and kept once."""

    dtype: str
    shape: tuple[int, ...] = ()
    ragged: bool = False
    by_content: bool = False


class PartitionSpec(Message, frozen=True):
    """A table. ``consumers``: name → the columns it reads; ``length_of``: the ragged column whose length is a row's
    number of tokens; ``writes``: consumer → the columns it adds, which it is done with a row when this has; ``by_row``:
    consumers that lease rows, not whole groups: for them every word about groups is about rows."""

    name: str
    columns: dict[str, ColumnSchema]
    consumers: dict[str, tuple[str, ...]]
    group_size: int = 1
    length_of: str = ""
    writes: dict[str, tuple[str, ...]] = {}
    by_row: tuple[str, ...] = ()


class Described(Message, frozen=True):
    """A partition, and the addresses of all storage units, whose numbers are their places in it from 1 on. ``made``:
    tells it from others of its name, before and after it, of ledgers before and after this one too; ``shard``,
    ``shards``: which of how many ledgers tells."""

    spec: PartitionSpec
    units: list[str]
    made: int
    shard: int = 0
    shards: int = 1


class Join(Message, frozen=True):
    """A storage unit is reached at ``address``. ``process``: what no other unit calls itself, so that one that is
    started anew at an address where another was is not taken for it. ``again``: it has joined before."""

    address: str
    process: str
    again: bool = False


class Put(Message, frozen=True):
    """Values to keep. ``rows``: int64, which rows get these columns; None for new rows, whose ids come back.
    ``version``: the policy version of new rows. ``tags``: numbers of each row
    that the ledger hears too; ``producer``: who says so, where that matters; ``fresh``: these are the first columns of
    ``rows``, and wait for room as new rows do. ``made``: as in :class:`Described`, of which partition of the name; 0:
    of whichever there is. ``once``: a name, under which new rows are kept once. ``wait``: for room, in
    seconds; 0: for as long as somebody waits for the answer."""

    partition: str
    rows: Array | None
    columns: dict[str, Array | Ragged | Repeated]
    version: int
    tags: dict[str, Array] | None = None
    producer: str = ""
    fresh: bool = False
    made: int = 0
    once: str = ""
    wait: float = 0.0


class Note(Message, frozen=True):
    """What a unit is about to keep. ``rows``: None for ``count`` new ones. ``nbytes``, ``tokens``: int64 [count].
    ``made``: the partition whose schema the values were compared with."""

    partition: str
    rows: Array | None
    count: int
    columns: tuple[str, ...]
    nbytes: Array
    tokens: Array
    version: int
    tags: dict[str, Array] | None = None
    producer: str = ""
    made: int = 0
    once: str = ""


class Notes(Message, frozen=True):
    """From a unit, by its number. ``turn``: rises with each word of the unit, but for one that it has to say again."""

    unit: int
    notes: list[Note]
    turn: int = 0


class Noted(Message, frozen=True):
    """``first``: the id of the first of new rows, which follow one another. ``refused``: int8 [count], 0 for rows to
    keep; None when all are. ``failed``: why the ledger takes none of them, which their producer is told and nobody
    else. ``remade``: it takes none because there is another partition of this name by now, with which the values are to
    be compared."""

    first: int = 0
    refused: Array | None = None
    failed: Failure | None = None
    remade: bool = False


class Fetch(Message, frozen=True):
    """A read: these columns of these rows of a partition. ``made``: as in :class:`Put`."""

    rows: Array
    columns: tuple[str, ...]
    partition: str
    made: int = 0


class Share(Message, frozen=True):
    """What ``rank`` of ``ranks`` gets of the consumer's batch with this number, counted from 0 on."""

    batch: int
    rank: int
    ranks: int


class LeaseCall(Message, frozen=True):
    """Up to ``groups``, as soon as there are ``at_least``, or DeadlineError after ``wait`` seconds; held for
    ``seconds``. ``token_budget``, ``min_version``: 0 for none. ``columns``: whose values are wanted at once, where
    the ledger's process has them. ``share``: the numbers of groups are those of all ranks, the budget is each one's.
    ``strict``: not even the first group may pass the budget. ``chosen``: int64, ids of groups, or rows where the
    consumer works by row: only those of these that are ready still, in this order. ``made``: as in :class:`Put`."""

    partition: str
    consumer: str
    groups: int
    at_least: int
    wait: float
    seconds: float
    token_budget: int = 0
    min_version: int = 0
    columns: tuple[str, ...] = ()
    share: Share | None = None
    strict: bool = False
    chosen: Array | None = None
    made: int = 0


class LookCall(Message, frozen=True):
    """What of a ``lease`` this ledger could give, as soon as it has ``at_least`` groups for it, or DeadlineError after
    ``wait`` seconds. Nothing is leased. ``after``: name all of them, and not before something became ready for the
    consumer more often than this."""

    lease: LeaseCall
    at_least: int
    wait: float
    after: int | None = None


class Ready(Message, frozen=True):
    """How many ``groups`` are ready, by version. ``each``: see :meth:`headrace.flow.ledger.Ledger.candidates`;
    ``became``: see :meth:`headrace.flow.ledger.Ledger.became_ready`."""

    groups: dict[int, int]
    each: Array | None = None
    became: int = 0


class Granted(Message, frozen=True):
    """``rows``: int64 [3, n]: ids, whole groups, the oldest first; tokens; how often each was leased by this consumer.
    ``unit``: that has every column the consumer reads of every row; or 0, and ``units``, int16 [n, columns], says who
    has which. ``values``: those that were wanted at once. ``shared``: groups of the batch of which this is a share."""

    lease: int
    rows: Array
    unit: int
    units: Array | None = None
    values: dict[str, Array | Ragged] | None = None
    shared: int = 0


class Holder(Message, frozen=True):
    """One of the ranks that share a batch of a consumer."""

    consumer: str
    rank: int


class LeaseRef(Message, frozen=True):
    """A lease of a partition. ``seconds``: for how much longer, where it is extended; ``holder``: who says so, where
    ranks share it."""

    partition: str
    lease: int
    seconds: float = 0.0
    holder: Holder | None = None


class FirstBatch(Message, frozen=True):
    """Which batch of a consumer is the first that not every rank has acknowledged. ``made``: as in :class:`Put`."""

    partition: str
    consumer: str
    made: int = 0


class Groups(Message, frozen=True):
    """Groups to give up. ``made``: as in :class:`Put`."""

    partition: str
    groups: list[int]
    made: int = 0


class LostCall(Message, frozen=True):
    """Groups that storage has lost, but for the first ``seen``, of which the caller was told; at once when there are
    some, else after ``wait`` seconds."""

    partition: str
    made: int
    """As in :class:`Described`: of which of the partitions that bore the name, one after another."""
    wait: float
    seen: int


class StatsCall(Message, frozen=True):
    """Where a partition stands. ``made``: as in :class:`Put`."""

    partition: str
    made: int = 0


class PartitionStats(Message, frozen=True):
    """Where a partition stands. ``ready``: groups by consumer; ``waiting``: consumers' calls that wait."""

    rows: int
    nbytes: int
    leases: int
    ready: dict[str, int]
    waiting: dict[str, int]


class Unkept(Message, frozen=True):
    """Groups of which a unit, by its number, could not keep what it had told of. ``made``: as in :class:`Note`;
    ``new``: nothing was kept of them before."""

    unit: int
    partition: str
    made: int
    groups: list[int]
    new: bool


class UnitFigures(Message, frozen=True):
    """How full a storage unit is. ``capacity``: bytes, 0 for no bound; ``waiting``: puts that wait for room, of
    ``waiting_bytes``; ``refused``: messages and peers that its server turned away, by reason; ``traffic``: see
    :meth:`headrace.dataplane.traffic.Traffic.so_far`."""

    rows: int
    nbytes: int
    capacity: int
    waiting: int
    waiting_bytes: int
    refused: dict[str, int]
    traffic: list[tuple[str, str, str, int]] = []


class PartitionState(Message, frozen=True):
    """A partition at one moment. ``units``: int16 [rows, columns], which unit has each value of the open groups' rows,
    0 for none; ``nbytes``: int64 [rows], how much they have; ``lost``: every group that ever was lost, in order;
    ``batches``: with which each consumer goes on whose ranks share them; ``named``: puts that are known by name, the
    first row of each and how many it has."""

    spec: PartitionSpec
    ledger: LedgerState
    units: Array
    nbytes: Array
    lost: list[int]
    batches: dict[str, int]
    named: dict[str, tuple[int, int]] = {}


class Frozen(Message, frozen=True):
    """A ledger at one moment. ``hold``: until it is let go, units delete nothing. ``units``: their addresses."""

    hold: int
    partitions: list[PartitionState]
    units: list[str]


class Reserve(Message, frozen=True):
    """Shared memory for one put. ``owner``: see :meth:`headrace.contract.SharedMemory.reserve`."""

    nbytes: int
    owner: str


class Reserved(Message, frozen=True):
    """None: there is no room for it, or not in memory that is shared."""

    region: Region | None


class PutPlaced(Message, frozen=True):
    """As :class:`Put`, of values that lie in a reserved region."""

    partition: str
    rows: Array | None
    region: Region
    columns: dict[str, Placed]
    version: int
    made: int = 0
    once: str = ""
    wait: float = 0.0


class Found(Message, frozen=True):
    """The answer to :class:`Fetch` of a unit with shared memory: values of columns that are small, and where those of
    the others lie. ``places``: of columns whose values rows share, at which of the values each row's is."""

    sent: dict[str, Array | Ragged]
    placed: dict[str, Placed]
    places: dict[str, Array] = {}
