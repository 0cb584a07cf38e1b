"""How the processes of one run reach each other, so that nobody else need know whether that is ipc or tcp."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.wire.address import ipc_address, tcp_address
from headrace.wire.client import Client
from headrace.wire.keys import Keys
from headrace.wire.server import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Ipc sockets in ``directory``, or, with a ``host``, tcp ports there that only holders of ``keys`` can use. The
    system chooses the ports: where a server is reached is what its ``start`` returns, never computed."""

    directory: str
    """Private directory (mode 0700) of the run."""
    host: str | None = None
    keys: Keys | None = None

    @classmethod
    def create(cls, directory: str, *, host: str | None = None) -> Network:
        """A new run's network; with a ``host``, fresh keys."""
        return cls(directory=directory, host=host, keys=None if host is None else Keys.generate())

    def address(self, name: str) -> str:
        """What the server of this name binds. WireError when an ipc socket would not be private."""
        return ipc_address(self.directory, name) if self.host is None else tcp_address(self.host)

    def server(self, *services: object, name: str, log: str = "") -> Server:
        """A server that is not started yet. ``log``: the file that its process logs to, if it is known."""
        return Server(*services, address=self.address(name), keys=self.keys, log=log)

    def client(self, address: str) -> Client:
        """A client of the server that reported ``address``."""
        return Client(address, keys=self.keys)
