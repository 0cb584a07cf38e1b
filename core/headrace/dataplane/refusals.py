"""What the ledger tells whose rows it does not take, or whose leases are not what they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.contract import Array
from headrace.dataplane.messages import Fetch, LeaseCall, LeaseRef, Noted
from headrace.dataplane.pending import Pending
from headrace.errors import DeadlineError, HeadraceError, LostRowsError, RunError
from headrace.wire.failures import to_failure

_NAMED = 5
"""Rows that an error names."""


def names_of(rows: Array) -> str:
    """The first of some rows, int64 [n]."""
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return f"rows {', '.join(map(str, rows[:_NAMED].tolist()))}{more}"


@contextmanager
def ended_in_words() -> Iterator[None]:
    """RunError in the place of a ledger's ValueError about a lease that ended."""
    try:
        yield
    except ValueError as error:
        raise RunError(
            str(error), fix="its rows are, or will be, given to another: do not use what came of them"
        ) from None


def lost_on_lease(ref: LeaseRef, groups: list[int]) -> LostRowsError:
    """Of groups, to whoever holds them."""
    return LostRowsError(
        f"lease {ref.lease} of partition {ref.partition!r} held groups {groups} when a storage unit lost them",
        fix="do not use what came of this lease: those groups are made anew, and its others are given again",
    )


def lost_rows(fetch: Fetch) -> LostRowsError:
    """What a storage does not find."""
    columns = ", ".join(fetch.columns)
    return LostRowsError(
        f"a storage unit has not all of the rows it was asked for: {names_of(fetch.rows)} of partition "
        f"{fetch.partition!r}, with {columns}",
        fix="read rows before their lease ends; what a unit has lost Partition.lost tells whoever makes it anew",
    )


def not_taken(error: HeadraceError) -> Noted:
    """Of a note, to the unit that told of it."""
    return Noted(failed=to_failure(0, error))


def too_large(nbytes: int, capacity: int) -> RunError:
    """Of a put, to its producer."""
    return RunError(
        f"a put of {nbytes} bytes can never fit a storage unit of {capacity}",
        fix="put fewer rows at once, or give the unit a larger capacity",
    )


def full(unit: int, held: int, capacity: int, waiting: int, pending: Pending) -> DeadlineError:
    """Of a unit that keeps ``held`` bytes, to the producer of a put that found no room in time."""
    return DeadlineError(
        f"storage unit {unit} is full, {held:,} of {capacity:,} bytes, and had no room within {pending.put.wait:.3g} s "
        f"for a put of {pending.nbytes:,}; {waiting} puts wait for room. Nothing was kept",
        fix="acknowledge or drop what is done with, so that rows leave; or start another unit, or one of more capacity",
    )


def too_few(lease: LeaseCall, ready: int, *, of: str = "") -> DeadlineError:
    """Of a lease that has waited in vain, when so many groups were ``ready``."""
    newer = f" of policy version {lease.min_version} or later" if lease.min_version else ""
    return DeadlineError(
        f"there were no {lease.at_least} groups of partition {lease.partition!r} for {lease.consumer}{of} within "
        f"{lease.wait:g} s: {ready}{newer} were ready",
        fix="ask for fewer, as at_least=1 does, or wait longer; a group is ready when each of its rows has all columns "
        "that the consumer reads, and nobody has it on lease",
    )
