"""Weights through a folder that trainer and engines both have, be it on another cluster.

A version is written once and read by any number of engines. Between two files of all tensors only what differs from the
first is written, exactly, so that the last version is two files away from anywhere. Versions can be read as long as the
files are there, also when the trainer is not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.contract import TransportCapabilities, TransportContext, WeightPublisher, WeightReceiver, WeightTransport
from headrace.errors import ConfigError
from headrace_weights.disk.publisher import DiskPublisher
from headrace_weights.disk.receiver import DiskReceiver


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings:
    """Of the publishing side."""

    path: str = ""
    """An absolute folder that engines have under the same name; empty: the run's own on this machine."""
    full_every: int = 10
    """Versions from one file of all tensors to the next; 1: every version is one."""

    def __post_init__(self) -> None:
        if self.path and not os.path.isabs(self.path):
            raise ValueError(f"path is absolute, got {self.path!r}")
        if self.full_every < 1:
            raise ValueError(f"full_every must be at least 1, got {self.full_every}")


class DiskTransport(WeightTransport):
    """Makes the two sides."""

    Settings = DiskSettings

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.settings: DiskSettings = settings

    @classmethod
    def capabilities(cls, settings: DiskSettings) -> TransportCapabilities:
        """Copied into the file, out of it, and through the disk on the way. A folder of the run's own is on one
        machine, of another one the job says that engines have it."""
        return TransportCapabilities(across_machines=bool(settings.path), private=True, copies=5)

    @classmethod
    def preflight(cls, settings: DiskSettings, *, directory: str, origin: Callable[[str], str]) -> None:
        path = settings.path
        if path and (not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK)):
            raise ConfigError(
                f"weights cannot be kept in {path}: it is no folder that this user can write to",
                origin=origin("path"),
                fix="make it, or name another one",
            )

    def publisher(self, context: TransportContext) -> WeightPublisher:
        return DiskPublisher(self.settings.path or context.directory, full_every=self.settings.full_every)

    def receiver(self, context: TransportContext, address: str) -> WeightReceiver:
        return DiskReceiver(address)
