"""The environment workers as the controller speaks to them.

Invariant: a worker that is lost misses what it is told, and nobody waits for it: one that is started again has never
heard of anything old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.errors import WireError
from headrace.services.messages import Message
from headrace.wire import Client

TELL_DEADLINE = 60.0


class Workers:
    """By node name. ``connect`` makes the client of an address."""

    def __init__(self, connect: Callable[[str], Client]) -> None:
        self._connect = connect
        self._clients: dict[str, Client] = {}

    def add(self, name: str, address: str) -> None:
        """A worker that serves."""
        self._clients[name] = self._connect(address)

    async def lost(self, name: str) -> None:
        """Forget a worker; who is telling it something stops waiting."""
        if (client := self._clients.pop(name, None)) is not None:
            await client.close()

    async def tell(
        self, method: str, message: Message | None, *, awaiting: str, deadline: float = TELL_DEADLINE
    ) -> None:
        """Have every worker do something; returns when all that are left have."""
        told = list(self._clients.items())  # one may be lost before its turn comes
        await asyncio.gather(*(self._tell(name, client, method, message, awaiting, deadline) for name, client in told))

    async def _tell(
        self, name: str, client: Client, method: str, message: Message | None, awaiting: str, deadline: float
    ) -> None:
        try:
            await client.call(method, message, deadline=deadline, awaiting=f"{name} {awaiting}")
        except WireError:
            if self._clients.get(name) is client:
                raise

    async def close(self) -> None:
        for name in list(self._clients):
            await self.lost(name)
