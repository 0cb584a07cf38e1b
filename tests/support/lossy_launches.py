"""What scaling works on in a lossy world: instances that are launched, and that end because they are not needed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

from headrace.run.scaling import Scale, ScaleCall, Scaling
from headrace.services.node_messages import node_id
from support.desk import turns


class Launches(ABC):
    """The half of a world that launches and stops."""

    scaling: Scaling
    up: dict[str, int]
    dismissed: set[str]
    """Nodes whose end is no loss."""
    emit: Callable[..., object]
    _live_versions: dict[str, int]

    @abstractmethod
    def _serve(self, name: str) -> str: ...

    async def _launch(self, name: str) -> None:
        self._live_versions[name] = 2
        self._serve(name)

    async def address(self, name: str) -> str:
        return node_id(name, self.up[name])

    def dismiss(self, name: str) -> None:
        self.dismissed.add(name)

    async def stop(self, name: str) -> None:
        if name in self.up:
            del self.up[name]
            self.emit("node_stopped", node=name, reason="ended")

    async def scale(self, instances: int) -> Scale | None:
        """What who asks is told at once; None when that is to come."""
        asking = asyncio.ensure_future(self.scaling.scale(ScaleCall(instances=instances)))
        await turns()
        if not asking.done():
            asking.cancel()
            await asyncio.wait({asking})
        return None if asking.cancelled() else asking.result()
