"""The storage units as one thread sees them: where they are, whose turn it is to keep rows, and which are gone.

A process that is stopped, or dead, never says so: while a unit's answer is waited for, the ledger is asked every few
seconds whether it has given the unit up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from headrace.contract import Array
from headrace.dataplane.connections import Connections
from headrace.dataplane.refusals import names_of
from headrace.dataplane.shared import Segments
from headrace.errors import DeadlineError, LostRowsError
from headrace.wire import BlockingClient, Meanwhile

LEARN_SECONDS = 5.0
"""After which a producer asks again where the storage units are, so that one that came later gets its share."""
ASK_SECONDS = 10.0
"""For the ledger to say whether a unit is gone that has met its deadline."""
TOLD_EARLIER = 1.0
"""Seconds before its deadline that a put is told for which there is no unit, or no room."""


class UnitClients:
    """``learn``: asks the ledger for all units' addresses, with a deadline."""

    def __init__(self, connections: Connections, learn: Callable[[float], list[str]]) -> None:
        self._connections = connections
        self._learn = learn
        self._turn = 0
        self.show([])

    def show(self, addresses: list[str]) -> None:
        """Where they are, by number; "" for those that are gone."""
        self.addresses, self._learned = addresses, monotonic()
        self._there = [number for number, address in enumerate(addresses, 1) if address]

    def learn(self, deadline: float) -> None:
        """Where they are now."""
        self.show(self._learn(deadline))

    def next(self, deadline: float) -> int:
        """Units in turn. When there is none, as soon as there is one: DeadlineError, from the ledger, when none comes
        until shortly before the deadline."""
        if not self._there or monotonic() > self._learned + LEARN_SECONDS:
            self._find(deadline)
        number = self._there[self._turn % len(self._there)]
        self._turn += 1
        return number

    def _find(self, deadline: float) -> None:
        end = monotonic() + deadline
        self.learn(deadline)
        if not self._there:
            left = max(end - monotonic(), deadline / 4)
            wait = left - min(TOLD_EARLIER, left / 4)
            awaiting = "a storage unit to be there"
            self.show(self._connections.client().call("units", wait, reply=list[str], deadline=left, awaiting=awaiting))

    def ask_anew(self) -> None:
        """Before the next turn: one that did not answer need not be met again if it is gone."""
        self._there.clear()

    def is_gone(self, number: int) -> bool:
        """As far as was heard."""
        return number <= len(self.addresses) and not self.addresses[number - 1]

    def client(self, number: int, deadline: float, rows: Array) -> BlockingClient:
        """LostRowsError when the unit is gone, and with it ``rows``."""
        if number > len(self.addresses):
            self.learn(deadline)
        if self.is_gone(number):
            raise unit_gone(number, rows)
        return self._connections.client(self.addresses[number - 1])

    def segments(self, number: int, deadline: float, rows: Array) -> Segments | None:
        """The memory that a unit shares."""
        address = self.addresses[number - 1]
        return self._connections.segments(number, address, deadline=deadline, meanwhile=self.meanwhile(number, rows))

    def meanwhile(self, number: int, rows: Array) -> Meanwhile | None:
        """What to do while a unit's answer is waited for: LostRowsError as soon as it is given up. None for one that is
        in the ledger's process."""
        if self._connections.client(self.addresses[number - 1]) is self._connections.client():
            return None
        return lambda left: self._require(number, rows, left)

    def _require(self, number: int, rows: Array, deadline: float) -> None:
        self.learn(deadline)
        if self.is_gone(number):
            raise unit_gone(number, rows)

    @contextmanager
    def noticing(self, number: int, rows: Array, deadline: float) -> Iterator[None]:
        """When a unit that has not answered in time is gone."""
        try:
            yield
        except DeadlineError as error:
            self._require(number, rows, min(deadline, ASK_SECONDS))
            raise DeadlineError(
                f"storage unit {number} does not answer, and the ledger has not given it up: {error.message}",
                fix="ask again: a unit that is gone is given up soon",
            ) from error


def unit_gone(number: int, rows: Array) -> LostRowsError:
    """Of a unit that the ledger has given up, to whoever asks for ``rows``."""
    kept = f", and with it what it kept of {names_of(rows)}" if len(rows) else ""
    return LostRowsError(
        f"storage unit {number} is gone{kept}",
        fix="do not use these rows, and give their lease back: Partition.lost tells whoever makes them anew",
    )
