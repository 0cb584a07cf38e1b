"""The flow room: which group may start, under which version and where; which rows may be trained, and when.

Sans-IO state machines: no clock, socket, thread or engine. The same code drives the real run, the property tests and
the simulator. Open :mod:`headrace.flow.flow` first; below it, `versions` (what is live), `ledger` (what is stored and
leased), `admission` (the staleness policy), `dispatch` (trajectories → instances) with `fleet` (who hosts and runs
what), `switching` (who loads what) and `rebalancing` (what goes on elsewhere), `batching` (how a batch is made up and
cut); beside it `stages` (what is done to rows, with which columns).
"""

from headrace.flow.flow import Flow
from headrace.flow.group_table import LATE, STORED
from headrace.flow.leases import Lease
from headrace.flow.records import (
    ROW,
    BatchLease,
    Counts,
    FlowColumns,
    FlowState,
    LedgerState,
    Move,
    StoredGroup,
    Switch,
    Ticket,
)
from headrace.flow.stages import TRAIN

__all__ = [
    "LATE",
    "ROW",
    "STORED",
    "TRAIN",
    "BatchLease",
    "Counts",
    "Flow",
    "FlowColumns",
    "FlowState",
    "Lease",
    "LedgerState",
    "Move",
    "StoredGroup",
    "Switch",
    "Ticket",
]
