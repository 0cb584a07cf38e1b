"""A consumer of the data plane in a node's event loop: leases that live as long as somebody works under them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import numpy as np

from headrace.contract import Batch
from headrace.dataplane.async_plane import DEADLINE, AsyncPlane
from headrace.dataplane.messages import Granted, LeaseCall, LeaseRef
from headrace.errors import DeadlineError, HeadraceError
from headrace.wire import Client

LEASE_SECONDS = 60.0
WAIT_SECONDS = 20.0
GRACE = 10.0
"""How much longer than the ledger a consumer waits for what the ledger decides."""


class AsyncConsumer:
    """``reads``: the columns the consumer reads, all of them, in the order in which the partition declares them."""

    def __init__(
        self, plane: AsyncPlane, ledger: Client, *, partition: str, consumer: str, reads: Sequence[str]
    ) -> None:
        self._plane = plane
        self._ledger = ledger
        self._partition = partition
        self._consumer = consumer
        self._reads = tuple(reads)

    @asynccontextmanager
    async def leased(self, most: int, *, tokens: int) -> AsyncIterator[Batch]:
        """What is ready, as soon as something is: up to ``most`` groups, or rows, of up to ``tokens`` tokens, with all
        that the consumer reads. Held while the block runs, and valid in it: see :meth:`AsyncPlane.get`. Acknowledged at
        its end, given back when it raises. LostRowsError when a storage unit has lost some of them."""
        granted = await self._granted(most, tokens)
        ref = LeaseRef(self._partition, granted.lease, LEASE_SECONDS)
        holding = asyncio.create_task(self._hold(ref), name=f"hold lease {ref.lease}")
        try:
            yield await self._values(granted)
            await self._tell("acknowledge", ref)
        except BaseException:  # whatever it was, others can have the rows; raised again
            with suppress(HeadraceError):  # the lease may be what ended
                await self._tell("release", ref)
            raise
        finally:
            holding.cancel()

    async def _granted(self, most: int, tokens: int) -> Granted:
        call = LeaseCall(self._partition, self._consumer, most, 1, WAIT_SECONDS, LEASE_SECONDS, tokens)
        while True:
            with suppress(DeadlineError):  # there are none yet; that the ledger is gone its heartbeats tell
                return await self._ledger.call(
                    "lease",
                    call,
                    reply=Granted,
                    deadline=WAIT_SECONDS + GRACE,
                    awaiting=f"rows for {self._consumer}",
                )

    async def _values(self, granted: Granted) -> Batch:
        rows = granted.rows[0]
        units = granted.units
        if units is None:
            units = np.full((len(rows), len(self._reads)), granted.unit, dtype=np.int16)
        return await self._plane.get(self._partition, rows, units, self._reads, held=True)

    async def _hold(self, ref: LeaseRef) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            await self._tell("extend", ref)

    async def _tell(self, method: str, ref: LeaseRef) -> None:
        await self._ledger.call(method, ref, deadline=DEADLINE, awaiting="the ledger")
