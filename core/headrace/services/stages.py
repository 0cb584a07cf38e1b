"""The separate stages as the controller speaks to them, and what they say.

Invariant: a stage that is started again goes on with the phase that runs; what its predecessor held is given to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from headrace.contract import Metric, merge_metrics
from headrace.services.messages import PeerCall
from headrace.services.stage_messages import Prepared, StagePhase
from headrace.services.workers import Workers
from headrace.wire import Client, rpc

BEGIN_DEADLINE = 300.0
"""Seconds to load a reference policy."""


class Stages:
    """By stage. ``connect`` makes the client of an address."""

    def __init__(self, connect: Callable[[str], Client]) -> None:
        self._connect = connect
        self._nodes: dict[str, Workers] = {}
        self._phase: Mapping[str, StagePhase] = {}
        """Stage → what it does in the phase that runs."""
        self._metrics: dict[int, dict[str, Metric]] = {}
        """By group, of those that are not trained."""

    # ------------------------------------------------------------ what they say

    @rpc
    async def prepared(self, told: Prepared) -> None:
        """What was measured when groups were prepared; a second time after a loss."""
        self._metrics.update(told.metrics)

    def metrics(self, groups: Iterable[int]) -> dict[str, Metric]:
        """Of a batch that was trained, whose groups are forgotten."""
        return merge_metrics([self._metrics.pop(group) for group in groups if group in self._metrics])

    # ------------------------------------------------------------ what they are told

    async def add(self, name: str, address: str) -> None:
        """A stage's node serves; it takes part in the phase that runs."""
        self._nodes[name] = Workers(self._connect)
        self._nodes[name].add(name, address)
        await self._begin(name)

    async def lost(self, name: str) -> None:
        """Who is telling it something stops waiting."""
        if (node := self._nodes.pop(name, None)) is not None:
            await node.lost(name)

    async def begin(self, phase: Mapping[str, StagePhase]) -> None:
        """A phase begins, whose rows the data plane takes; ``phase``: of each stage that takes part."""
        self._phase = phase
        self._metrics.clear()
        for name in list(self._nodes):
            await self._begin(name)

    async def _begin(self, name: str) -> None:
        if name in self._phase and name in self._nodes:
            node, phase = self._nodes[name], self._phase[name]
            await node.tell("begin_phase", phase, awaiting="to begin a phase", deadline=BEGIN_DEADLINE)

    async def end(self) -> None:
        """The phase is over: what stages hold is given back."""
        self._phase = {}
        for node in list(self._nodes.values()):
            await node.tell("end_phase", None, awaiting="to end a phase")

    async def tell(self, method: str, peer: PeerCall, *, awaiting: str) -> None:
        """About another node, to every stage; see :meth:`Workers.tell`."""
        for node in list(self._nodes.values()):
            await node.tell(method, peer, awaiting=awaiting)

    async def close(self) -> None:
        for name in list(self._nodes):
            await self.lost(name)
