"""A data plane in a file, and back.

A snapshot is each ledger at one moment, and the values of the rows that were there then, which units do not delete
until they are read; producers and consumers go on meanwhile, and what they do after that moment is not in it. A lease
that was out is none in the snapshot: its groups are given again, and what was acknowledged is not. Ids, attempts,
versions, what was lost and the numbers of batches that ranks share are as they were, and so are the partitions' specs;
how much a unit may hold is said when it starts.

Whoever restores puts the values into the units that there are then, in turn, and consumers are served when all are
there. Groups of one version come in the order of their ids then, not in that in which they became ready.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import numpy as np

from headrace.contract import Array, Batch
from headrace.dataplane.contents import values_of
from headrace.dataplane.gathering import parts
from headrace.dataplane.messages import Described, Fetch, Frozen, Message, Noted, PartitionState, Put
from headrace.dataplane.unit_clients import unit_gone
from headrace.errors import ContractError, DeadlineError, HeadraceError, LostRowsError, RunError
from headrace.wire import BlockingClient, RecordWriter, RefusedError, decode, read_records

FORMAT = 1
PORTION_BYTES = 32 << 20
"""Of values that are read at once, unless one row has more."""
DEADLINE = 60.0
"""Of one read."""
Connect = Callable[[str], BlockingClient]
T = TypeVar("T")


class Head(Message, frozen=True):
    """What a snapshot begins with; then come the partitions' states, and then values. ``ledgers``: by shard, how many
    partitions each has."""

    format: int
    ledgers: list[int]


class _Source(NamedTuple):
    """Of values: a unit, where it is, and the ledger that knows whether it still is."""

    unit: int
    address: str
    ledger: BlockingClient


class Values(Message, frozen=True):
    """Values of rows of a partition."""

    partition: str
    batch: Batch


def take(path: Path, ledgers: Sequence[str], client: Connect, *, deadline: float) -> None:
    """Write a snapshot of the ledgers at these addresses, which are all shards of a data plane. ``client``: of an
    address. Nothing has the name ``path`` when it fails: LostRowsError when a unit lost values meanwhile."""
    end = monotonic() + deadline
    try:
        with RecordWriter(path) as writer:
            _take(writer, ledgers, client, deadline, end)
            writer.commit()
    except OSError as error:
        raise RunError(
            f"snapshot {path} cannot be written: {error.strerror}",
            origin=str(path),
            fix=_mended(error, path),
        ) from error


def _mended(error: OSError, path: Path) -> str:
    """What to do about a file that cannot be written."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"make the folder {path.parent}, or name a file in another one"
    if isinstance(error, IsADirectoryError):
        return f"{path} is a folder: name a file in it"
    if isinstance(error, PermissionError):
        return "name a place where this user may write"
    return "free disk space, or name another place"


def _take(writer: RecordWriter, ledgers: Sequence[str], client: Connect, seconds: float, end: float) -> None:
    frozen: list[Frozen] = []
    try:
        for address in ledgers:
            sent = client(address).send("freeze", seconds, deadline=_left(end), awaiting="a ledger's state")
            frozen.append(client(address).receive(sent, Frozen))
        _write(writer, ledgers, frozen, client, end)
    except BaseException:  # whatever it was, ledgers must not keep holding what is deleted; raised again
        with suppress(HeadraceError):  # a hold ends by itself
            _thaw(ledgers, frozen, client, end)
        raise
    _thaw(ledgers, frozen, client, end)


def _thaw(ledgers: Sequence[str], frozen: Sequence[Frozen], client: Connect, end: float) -> None:
    for address, ledger in zip(ledgers, frozen, strict=False):
        client(address).call("thaw", ledger.hold, deadline=_left(end), awaiting="a ledger to go on deleting")


def _write(writer: RecordWriter, ledgers: Sequence[str], frozen: Sequence[Frozen], client: Connect, end: float) -> None:
    writer.write(Head(FORMAT, [len(ledger.partitions) for ledger in frozen]))
    for ledger in frozen:
        for state in ledger.partitions:
            writer.write(state)
    for at, ledger in zip(ledgers, frozen, strict=True):
        for state in ledger.partitions:
            for rows, units in _portions(state):
                for part in parts(units, tuple(state.spec.columns)):
                    if part.unit:
                        fetch = Fetch(rows[part.at], part.columns, state.spec.name)
                        source = _Source(part.unit, ledger.units[part.unit - 1], client(at))
                        writer.write(Values(state.spec.name, _read(source, fetch, client, end)))


def _portions(state: PartitionState) -> Iterator[tuple[Array, Array]]:
    """Rows, and which units have their values, in portions of about ``PORTION_BYTES``."""
    size = state.spec.group_size
    rows = (state.ledger.groups[:, None] * size + np.arange(size)).reshape(-1)
    portion = np.cumsum(state.nbytes) // PORTION_BYTES
    cuts = np.flatnonzero(np.diff(portion)) + 1
    yield from zip(np.split(rows, cuts), np.split(state.units, cuts), strict=True)


def _read(source: _Source, fetch: Fetch, client: Connect, end: float) -> Batch:
    """LostRowsError when the unit is gone, DeadlineError when it does not answer in time."""
    seconds, awaiting = min(DEADLINE, _left(end)), "values for a snapshot"
    try:
        if not source.address:
            raise unit_gone(source.unit, fetch.rows)
        unit = client(source.address)
        meanwhile = None if unit is source.ledger else lambda left: _require(source, fetch, left)
        return unit.call("get", fetch, reply=Batch, deadline=seconds, awaiting=awaiting, meanwhile=meanwhile)
    except LostRowsError as error:
        raise LostRowsError(
            f"values that a snapshot names are lost: {error.message}",
            fix="take the snapshot again: by then the ledger knows what is lost",
        ) from error
    except DeadlineError as error:
        raise DeadlineError(
            f"storage unit {source.unit} did not send values for a snapshot: {error.message}",
            fix="give it a later deadline; a unit that is gone is given up soon",
        ) from error


def _require(source: _Source, fetch: Fetch, seconds: float) -> None:
    """LostRowsError when the ledger has given the unit up."""
    with suppress(ContractError):  # the partition was removed meanwhile; the snapshot has it
        described = source.ledger.call(
            "describe", fetch.partition, reply=Described, deadline=seconds, awaiting="where storage units are"
        )
        if not described.units[source.unit - 1]:
            raise unit_gone(source.unit, fetch.rows)


def put_back(path: Path, ledgers: Sequence[str], client: Connect, *, deadline: float) -> None:
    """Have empty ledgers continue where those of a snapshot were. RunError, and nothing done, when the file is not
    whole or has another number of shards; ContractError where there are partitions already."""
    end = monotonic() + deadline
    head = _verified(path)
    if len(head.ledgers) != len(ledgers):
        raise RunError(
            f"{path} is a snapshot of {len(head.ledgers)} ledgers, there are {len(ledgers)}",
            origin=str(path),
            fix="start as many; units may be more or fewer",
        )
    first = client(ledgers[0])
    known = first.call("units", reply=list[str], deadline=_left(end), awaiting="a storage unit to be there")
    units = [unit for unit in known if unit]
    records = read_records(path)
    next(records)
    for address, count in zip(ledgers, head.ledgers, strict=True):
        states = [_decoded(path, next(records), PartitionState) for _ in range(count)]
        client(address).call("restore", states, deadline=_left(end), awaiting="a ledger to continue an earlier one")
    turns = itertools.cycle(units)
    for record in records:
        values = _decoded(path, record, Values)
        for rows in np.array_split(np.arange(len(values.batch)), len(units)):
            if len(rows):
                _put(client(next(turns)), values.partition, values.batch.take(rows), end)


def _put(unit: BlockingClient, partition: str, batch: Batch, end: float) -> None:
    put = Put(partition, batch.rows, values_of(batch), 0)
    unit.call("put", put, reply=Noted, deadline=_left(end), awaiting="a storage unit to take rows back")


def _verified(path: Path) -> Head:
    """RunError unless all of the file is as it was written."""
    records = read_records(path)
    head = _decoded(path, next(records, []), Head)
    if head.format != FORMAT:
        raise RunError(
            f"snapshot {path} has format {head.format}, expected {FORMAT}",
            origin=str(path),
            fix="restore it with the version of Headrace that wrote it",
        )
    for _ in records:
        pass
    return head


def _decoded(path: Path, frames: list[Any], kind: type[T]) -> T:
    try:
        return decode(frames, kind)
    except RefusedError as error:
        raise RunError(
            f"{path} is whole and no snapshot that is understood: {error.message}",
            origin=str(path),
            fix="name a snapshot; restore one with the version of Headrace that wrote it",
        ) from error


def _left(end: float) -> float:
    """Seconds, above 0. DeadlineError when there are none."""
    left = end - monotonic()
    if left <= 0:
        raise DeadlineError("a snapshot was not written or read in time", fix="give it a later deadline")
    return left
