"""A ledger in several parts, each of which owns groups: whoever has an id knows whose it is.

Ids of a shard are a range of their own, dense from its beginning on, so that a shard counts as a whole ledger does and
no id says how many shards there are. Units join all shards, which number them, and miss them, each for itself.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from zlib import crc32

import msgspec
import numpy as np

from headrace.contract import Array
from headrace.dataplane.links import RemoteLedger
from headrace.dataplane.messages import Described, Join, Note, Noted, Notes, Unkept
from headrace.errors import ContractError, DeadlineError, HeadraceError
from headrace.wire.failures import to_failure

SHARD_BITS = 52
"""Of the ids of rows and leases: 2,048 shards."""
PARTITION_BITS = 40
"""Of the ids of rows: 4,096 partitions of 10¹² rows, per shard."""
MADE_BITS = 62
"""Of what is drawn to tell partitions of a name from each other."""

_Said = TypeVar("_Said", Note, Unkept)


def first_row(shard: int, partition: int) -> int:
    """Where the row ids of a shard's partition begin; partitions are counted."""
    return (shard << SHARD_BITS) + (partition << PARTITION_BITS)


def partition_of(row: int) -> int:
    """The number of a row's partition, of those of its shard."""
    return (row >> PARTITION_BITS) & ((1 << SHARD_BITS - PARTITION_BITS) - 1)


def made_of(shards: Sequence[int]) -> int:
    """What tells a partition from others of its name, of what does so at each shard: another as soon as one of them
    is."""
    return sum(shards) % (1 << MADE_BITS)


def shards_of(groups: Array, group_size: int) -> Array:
    """int64 [n]: which shard has each group (int64 [n])."""
    shards: Array = (groups * group_size) >> SHARD_BITS
    return shards


def check_place(described: Described, shard: int, shards: int) -> None:
    """ContractError for a ledger that is not the one it was named as."""
    if (described.shard, described.shards) != (shard, shards):
        raise ContractError(
            f"a ledger that was named as shard {shard} of {shards} is shard {described.shard} of {described.shards}",
            fix="name all ledgers of the data plane, in their order",
        )


def fair_shares(there: Sequence[int], wanted: int, *, first: int) -> list[int]:
    """How many of ``wanted`` to take from each, of what is ``there``: as even as can be, and what cannot be cut evenly
    from place ``first`` on."""
    shares = [0] * len(there)
    order = [(first + place) % len(there) for place in range(len(there))]
    while wanted and (left := [place for place in order if shares[place] < there[place]]):
        each = max(1, wanted // len(left))
        for place in left:
            more = min(each, there[place] - shares[place], wanted)
            shares[place] += more
            wanted -= more
    return shares


def oldest_shares(ready: Sequence[Mapping[int, int]], wanted: int, *, first: int) -> list[tuple[int, int]]:
    """Shards, and how many groups to take from each in turn, so that the oldest of all come first. ``ready``: by shard
    and version, how many groups there are."""
    runs: list[tuple[int, int]] = []
    for version in sorted({version for shard in ready for version in shard}):
        shares = fair_shares([shard.get(version, 0) for shard in ready], wanted, first=first)
        wanted -= sum(shares)
        for shard, share in enumerate(shares):
            if share and runs and runs[-1][0] == shard:
                runs[-1] = (shard, runs[-1][1] + share)
            elif share:
                runs.append((shard, share))
    return runs


class ShardedLedger:
    """All shards as a unit sees them: as one. New groups go to them in turn, columns of others to whose they are."""

    def __init__(self, shards: Sequence[RemoteLedger]) -> None:
        self._shards = shards
        self._numbers: list[int] = []
        """Of the unit, by shard."""
        self._group_sizes: dict[str, int] = {}
        self._made: dict[tuple[str, int], list[int]] = {}
        """By partition and what tells it from others of its name: what does so at each shard."""
        self._turns = itertools.count()
        self._word: tuple[int, list[int]] = 0, []
        """The turn of the last word, and whose each of its notes was."""

    def join(self, unit: Join) -> asyncio.Future[int]:
        """Any number: each shard has its own."""
        return asyncio.ensure_future(self._join(unit))

    async def _join(self, unit: Join) -> int:
        self._numbers = await asyncio.gather(*(shard.join(unit) for shard in self._shards))
        return self._numbers[0]

    def describe(self, partition: str) -> asyncio.Future[Described]:
        return asyncio.ensure_future(self._describe(partition))

    async def _describe(self, partition: str) -> Described:
        described = await asyncio.gather(*(shard.describe(partition) for shard in self._shards))
        for place, found in enumerate(described):
            check_place(found, place, len(self._shards))
        made = [found.made for found in described]
        whole = msgspec.structs.replace(described[0], made=made_of(made))
        self._group_sizes[partition] = whole.spec.group_size
        self._made[partition, whole.made] = made
        return whole

    def note(self, notes: Notes) -> asyncio.Future[list[Noted]]:
        """Each note's rows are of one shard. DeadlineError when a shard did not answer: notes that are told again, in
        the same turn, go to the same shards, and those that have taken theirs answer as before."""
        if self._word[0] != notes.turn:
            self._word = notes.turn, [self._shard_of(note) for note in notes.notes]
        shards = self._word[1]
        asked = sorted(set(shards))
        told = [self._tell(whose, notes, shards) for whose in asked]
        return told[0] if len(told) == 1 else asyncio.ensure_future(_together(asked, told, shards))

    def _tell(self, whose: int, notes: Notes, shards: Sequence[int]) -> asyncio.Future[list[Noted]]:
        theirs = [self._made_at(whose, note) for note, shard in zip(notes.notes, shards, strict=True) if shard == whose]
        return self._shards[whose].note(Notes(self._numbers[whose], theirs, notes.turn))

    def _made_at(self, shard: int, said: _Said) -> _Said:
        return msgspec.structs.replace(said, made=self._made[said.partition, said.made][shard])

    def _shard_of(self, note: Note) -> int:
        if note.once:  # which one shard remembers
            return crc32(note.once.encode()) % len(self._shards)
        if note.rows is None or not len(note.rows):
            return next(self._turns) % len(self._shards)
        return min(int(note.rows[0]) >> SHARD_BITS, len(self._shards) - 1)

    def kept(self, partition: str) -> None:
        """Shards are in other processes, which offer rows when they are told."""

    def unkept(self, unkept: Unkept) -> None:
        groups = np.array(unkept.groups, dtype=np.int64)
        whose = shards_of(groups, self._group_sizes[unkept.partition])
        for shard in np.unique(whose).tolist():
            theirs = self._made_at(shard, unkept)
            gone = groups[whose == shard].tolist()
            self._shards[shard].unkept(msgspec.structs.replace(theirs, unit=self._numbers[shard], groups=gone))


async def _together(
    asked: Sequence[int], told: Sequence[asyncio.Future[list[Noted]]], shards: Sequence[int]
) -> list[Noted]:
    """Of each note, by the shard that was asked, the answer."""
    answers: dict[int, Any] = {}
    for shard, answer in zip(asked, await asyncio.gather(*told, return_exceptions=True), strict=True):
        if isinstance(answer, HeadraceError) and not isinstance(answer, DeadlineError):
            # The others' notes are taken none the less.
            answers[shard] = itertools.repeat(Noted(failed=to_failure(0, answer)))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            answers[shard] = iter(answer)
    return [next(answers[shard]) for shard in shards]
