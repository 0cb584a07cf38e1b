"""The ``launcher`` role: places a node's process and watches it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.contract.plugin import Plugin


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLaunch:
    """One process to start."""

    name: str
    python: str
    """Interpreter; it must be able to import ``headrace`` and the node's plugin."""
    arguments: tuple[str, ...]
    """After the interpreter."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the launcher's own environment."""
    log_path: str
    """Where its stdout and stderr go."""


class NodeProcess(ABC):
    """A started process. It dies with the launcher's process, however that ends."""

    @property
    @abstractmethod
    def pid(self) -> int: ...

    @abstractmethod
    async def wait(self) -> int:
        """The exit status; negative for a signal."""

    @abstractmethod
    def terminate(self) -> None:
        """Ask it, and all it started, to end. No error when it has ended."""

    @abstractmethod
    def kill(self) -> None:
        """End it, and all it started, at once. No error when it has ended."""


class Launcher(Plugin, ABC):
    """Starts processes."""

    @abstractmethod
    async def launch(self, node: NodeLaunch) -> NodeProcess:
        """PluginError when the interpreter cannot be started."""
