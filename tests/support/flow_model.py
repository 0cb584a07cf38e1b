"""A plain model of the flow, and the policies it is tried with."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.contract import StalenessPolicy
from headrace_staleness.multi_version import MultiVersion
from headrace_staleness.synchronous import Synchronous

POLICIES: list[StalenessPolicy] = [
    *(
        MultiVersion(MultiVersion.Settings(max_staleness=bound, outstanding_batches=outstanding))
        for bound, outstanding in [(2, None), (1, None), (2, 1.5), (3, 3), (3, 1), (0, None)]
    ),
    Synchronous(Synchronous.Settings()),
]


@dataclass
class Trajectory:
    version: int
    state: str = "waiting"
    """waiting (for its tokens) → generated → stored → trained; or dropped."""


@dataclass
class Node:
    slots: int
    live_versions: int
    versions: set[int]
