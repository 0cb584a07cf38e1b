"""What one thread is connected to: a ledger, storage units, and the memory that these share."""

from __future__ import annotations

from collections.abc import Callable

from headrace.dataplane.shared import Segments
from headrace.errors import WireError
from headrace.wire import BlockingClient, Meanwhile


class Connections:
    """Of the ledger at an address. ``connect``: a client of an address; closed with :meth:`close`."""

    def __init__(self, ledger: str, connect: Callable[[str], BlockingClient]) -> None:
        self._connect = connect
        self._clients: dict[str, BlockingClient] = {}
        self._segments: dict[int, Segments | None] = {}
        """By the unit's number: another one may be at its address later."""
        self._ledger = ledger
        self._closed = False

    def client(self, address: str = "") -> BlockingClient:
        """Of a unit, or of the ledger. WireError after :meth:`close`."""
        address = address or self._ledger
        if self._closed:
            raise WireError(f"the data plane of {self._ledger} was closed", fix="make another DataPlane")
        if address not in self._clients:
            self._clients[address] = self._connect(address)
        return self._clients[address]

    def segments(
        self, number: int, address: str, *, deadline: float, meanwhile: Meanwhile | None = None
    ) -> Segments | None:
        """The memory that a unit shares; None where it shares none, or this process cannot map it."""
        if number not in self._segments:
            directory = self.client(address).call(
                "segments",
                reply=str,
                deadline=deadline,
                awaiting="a storage unit to say what it shares",
                meanwhile=meanwhile,
            )
            self._segments[number] = Segments.reach(directory)
        return self._segments[number]

    def close(self) -> None:
        """Twice is fine."""
        self._closed = True
        for segments in self._segments.values():
            if segments is not None:
                segments.close()
        for client in self._clients.values():
            client.close()
