"""A plain model of the flow, and the policies it is tried with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headrace.contract import StalenessPolicy
from headrace.flow import Flow
from headrace_staleness.deadlines import Deadlines
from headrace_staleness.delayed_update import DelayedUpdate
from headrace_staleness.multi_version import MultiVersion
from headrace_staleness.partial_rollout import PartialRollout
from headrace_staleness.synchronous import Synchronous
from headrace_staleness.windowed import Windowed

POLICIES: list[StalenessPolicy] = [
    *(
        MultiVersion(MultiVersion.Settings(max_staleness=bound, outstanding_batches=outstanding))
        for bound, outstanding in [(2, None), (1, None), (2, 1.5), (3, 3), (3, 1), (0, None)]
    ),
    Synchronous(Synchronous.Settings()),
    *(Windowed(Windowed.Settings(max_staleness=bound)) for bound in (2, 1, 3, 0)),
    DelayedUpdate(DelayedUpdate.Settings()),
    *(
        PartialRollout(PartialRollout.Settings(max_staleness=bound, outstanding_batches=outstanding))
        for bound, outstanding in [(2, None), (1, None), (3, 3), (0, None)]
    ),
]


def most_in_flight(policy: StalenessPolicy) -> int:
    """How many versions have unfinished groups at most. Where publication waits there is room for one fewer."""
    gated = isinstance(policy, Synchronous) or (isinstance(policy, Deadlines) and policy.waits == "publication")
    return max(policy.max_staleness, 1) if gated else policy.max_staleness + 1


@dataclass
class Trajectory:
    version: int
    """Of its group."""
    under: int
    """What it is generated under."""
    oldest: int
    """The version of its oldest token."""
    state: str = "waiting"
    """waiting (for its tokens) → generated → stored → trained; or dropped."""


def come_back(flow: Flow, rows: Mapping[int, Trajectory]) -> None:
    """Storage has the values of what was stored again, 10 bytes a row."""
    stored = np.array([number for number, row in rows.items() if row.state == "stored"], dtype=np.int64)
    assert flow.ledger.awaited == len(stored)
    assert not flow.ledger.place(stored, ("row",), nbytes=np.full(len(stored), 10), unit=1).any()
    assert not flow.ledger.awaited


@dataclass
class Node:
    slots: int
    live_versions: int
    versions: set[int]
