"""What the rows of a phase are made of, as its partition in the data plane."""

from __future__ import annotations

from headrace.contract.columns import (
    BEHAVIOUR_LOGPROBS,
    GROUP,
    LOSS_MASK,
    REWARD,
    TOKENS,
    TRUNCATED,
    VERSION,
)
from headrace.dataplane import ColumnSchema, PartitionSpec
from headrace.flow import TRAIN, FlowColumns

_KINDS = {
    TOKENS: ColumnSchema("int32", ragged=True),
    LOSS_MASK: ColumnSchema("bool", ragged=True),
    BEHAVIOUR_LOGPROBS: ColumnSchema("float32", ragged=True),
    REWARD: ColumnSchema("float32"),
    GROUP: ColumnSchema("int64"),
    VERSION: ColumnSchema("int64"),
    TRUNCATED: ColumnSchema("bool"),
}
_FIRST = tuple(_KINDS)


def flow_columns() -> FlowColumns:
    """For the flow's ledger."""
    return FlowColumns(all=_FIRST, first=_FIRST, consumers={TRAIN: _FIRST})


def phase_partition(name: str, *, group_size: int) -> PartitionSpec:
    """For the data plane, without the consumer ``train``, which the run's loop is."""
    return PartitionSpec(name, dict(_KINDS), {}, group_size, TOKENS)
