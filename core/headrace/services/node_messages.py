"""What every node is started with, and what it tells of itself, whatever its role."""

from __future__ import annotations

from headrace.contract import CONTRACT_VERSION
from headrace.services.messages import Message
from headrace.wire import Network


def node_id(name: str, start: int) -> str:
    """Of the process of a node that was started ``start`` times before."""
    return f"{name}.{start}"


class NodeSpec(Message, frozen=True):
    """What a node process reads first; written to a private file by the supervisor, since it holds the run's keys."""

    name: str
    role: str
    start: int
    """How often the node was started before."""
    controller: str
    """Address of the controller."""
    network: Network
    setup: bytes
    """The role's own setup message, msgpack."""
    log: str = ""
    """The file that the process logs to."""
    contract: int = CONTRACT_VERSION
    """Of the controller's headrace; the node refuses another one than its own."""

    @property
    def id(self) -> str:
        """Of this process, as opposed to the node, which may be started again."""
        return node_id(self.name, self.start)


class Registration(Message, frozen=True):
    """A node tells the controller that it serves. ``node``: id of the process."""

    node: str
    pid: int
    address: str
    contract: int = CONTRACT_VERSION
    """Of the node's headrace; the controller refuses another one than its own."""


class Heartbeat(Message, frozen=True):
    """Sent every second by every node. ``node``: id of the process."""

    node: str
    loop_lag: float
    """Seconds by which the node's event loop was late since the last heartbeat, at most."""
    kv_used: float | None = None
    """Share of an instance's memory for keys and values; None for other nodes."""
    parked: int = 0
    """Requests that an instance set aside in host memory since the last heartbeat."""
