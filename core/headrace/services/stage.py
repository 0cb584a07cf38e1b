"""The node of a separate stage: a consumer of the data plane that reads rows and adds columns to them.

    lease what is ready → compute on one thread → put the columns → acknowledge

Two leases are under way at a time, so that values travel while others are computed. A row is done when its columns are
stored, whatever becomes of this process; what it held then is another's. Invariant: a column is stored once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import numpy as np

from headrace import clock
from headrace.contract import Batch
from headrace.dataplane import AsyncConsumer, AsyncPlane
from headrace.errors import LostRowsError, RunError
from headrace.services.messages import PeerCall
from headrace.services.node import NodeService
from headrace.services.node_messages import NodeSpec
from headrace.services.rows import FINISHED, STARTED
from headrace.services.stage_messages import Prepared, StagePhase, StageSetup
from headrace.services.stage_work import WORK, Done, StageWork
from headrace.wire import rpc

T = TypeVar("T")

LANES = 2
"""Leases under way."""
AT_ONCE = 4096
"""Rows, or groups, of a lease at most; what a person sets is the number of their tokens."""
LOST_IN_A_ROW = 100
"""Leases whose rows were lost, one after the other, before somebody should know."""
TELL_DEADLINE = 60.0


class StageService(NodeService):
    """Does one stage of a phase after the other. The node has the stage's name."""

    def __init__(self, spec: NodeSpec) -> None:
        super().__init__(spec)
        self._setup = msgspec.msgpack.decode(spec.setup, type=StageSetup)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage")
        self._ledger = self.network.client(self._setup.ledger)
        self._plane = AsyncPlane(self._setup.ledger, name=spec.id, connect=self.network.client)
        self._work: StageWork | None = None
        self._lanes: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        await self._end()
        self._thread.shutdown()
        await self._plane.close()
        await self._ledger.close()

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # ------------------------------------------------------------ phases

    @rpc
    async def begin_phase(self, phase: StagePhase) -> None:
        """Work on this phase's rows from now on."""
        await self._end()
        self._work = work = await self._on_thread(lambda: WORK[self.name](phase, self._setup))
        consumer = AsyncConsumer(
            self._plane, self._ledger, partition=phase.partition, consumer=self.name, reads=phase.reads
        )
        self._lanes = [
            self.supervise(self._lane(work, phase, consumer), f"{self.name} of {phase.partition}, {lane}")
            for lane in range(LANES)
        ]

    @rpc
    async def end_phase(self, request: None) -> None:
        """Nobody wants the rest of the phase's rows: what is held is given back."""
        await self._end()

    async def _end(self) -> None:
        for lane in self._lanes:
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        self._lanes = []
        if self._work is not None:
            await self._on_thread(self._work.close)
            self._work = None

    @rpc
    async def unit_lost(self, peer: PeerCall) -> None:
        """The storage unit at this address is gone."""
        await self._plane.lost(peer.address)

    @rpc
    async def unit_joined(self, peer: PeerCall) -> None:
        """There is a storage unit at this address."""
        self._plane.joined()

    # ------------------------------------------------------------ rows

    async def _lane(self, work: StageWork, phase: StagePhase, consumer: AsyncConsumer) -> None:
        lost = 0
        while True:
            try:
                async with consumer.leased(AT_ONCE, tokens=phase.tokens) as batch:
                    await self._finish(work, phase, batch)
            except LostRowsError as error:  # those of their groups are dropped; the others are ready again
                lost += 1
                if lost == LOST_IN_A_ROW:
                    raise RunError(
                        f"{lost} leases of stage {self.name} in a row had rows that storage has lost: {error.message}",
                        origin=f"node {self.name}",
                        fix="the ledger offers rows that no storage unit has; report this with the run's logs",
                    ) from error
            else:
                lost = 0

    async def _finish(self, work: StageWork, phase: StagePhase, batch: Batch) -> None:
        started, done = await self._on_thread(lambda: _timed(work, batch))
        if done.metrics:
            # Before the columns, which may make a group ready to be trained: its metrics are there by then.
            await self._ledger.call(
                "prepared",
                Prepared(metrics=done.metrics),
                deadline=TELL_DEADLINE,
                awaiting="the controller to take metrics",
            )
        tags = {name: np.full(len(batch), at) for name, at in ((STARTED, started), (FINISHED, clock.now()))}
        await self._plane.put(phase.partition, done.columns, rows=batch.rows, tags=tags)


def _timed(work: StageWork, batch: Batch) -> tuple[float, Done]:
    """When it began, and what came of it."""
    return clock.now(), work.compute(batch)
