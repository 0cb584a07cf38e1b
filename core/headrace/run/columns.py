"""What the rows of a phase are made of, as its partition in the data plane: derived from the phase's stages."""

from __future__ import annotations

from headrace.contract.columns import (
    ADVANTAGES,
    BEHAVIOUR_LOGPROBS,
    DENOMINATOR,
    GREEDY,
    GROUP,
    LOSS_MASK,
    LOSS_WEIGHTS,
    REFERENCE_LOGPROBS,
    REWARD,
    TOKEN_VERSIONS,
    TOKENS,
    TRAINED,
    TRUNCATED,
    TURN_REWARDS,
    VERSION,
)
from headrace.dataplane import ColumnSchema, PartitionSpec
from headrace.flow import TRAIN, FlowColumns
from headrace.flow.stages import Stage, separable, stored_first

_KINDS = {
    TOKENS: ColumnSchema("int32", ragged=True),
    LOSS_MASK: ColumnSchema("bool", ragged=True),
    BEHAVIOUR_LOGPROBS: ColumnSchema("float32", ragged=True),
    GROUP: ColumnSchema("int64"),
    GREEDY: ColumnSchema("bool"),
    VERSION: ColumnSchema("int64"),
    TOKEN_VERSIONS: ColumnSchema("int32", ragged=True),
    TRUNCATED: ColumnSchema("bool"),
    REWARD: ColumnSchema("float32"),
    TURN_REWARDS: ColumnSchema("float32", ragged=True),
    REFERENCE_LOGPROBS: ColumnSchema("float32", ragged=True),
    LOSS_WEIGHTS: ColumnSchema("float32", ragged=True),
    DENOMINATOR: ColumnSchema("float64"),
    ADVANTAGES: ColumnSchema("float32", ragged=True),
    TRAINED: ColumnSchema("bool"),
}


def flow_columns(stages: tuple[Stage, ...], *, apart: bool, lockstep: bool) -> FlowColumns:
    """For the flow's ledger. ``apart``: stages that can have processes of their own have them; otherwise the trainer
    does what they do, and their columns are stored nowhere. ``lockstep``: stages work on whole groups alone."""
    own = [stage for stage in stages if apart and separable(stage)]
    first = stored_first(stages)
    every = (*first, *(column for stage in own for column in stage.writes))
    return FlowColumns(
        all=every,
        first=first,
        consumers={**{stage.name: stage.reads for stage in own}, TRAIN: every},
        writes={stage.name: stage.writes for stage in own},
        by_row=tuple(stage.name for stage in own if stage.by_row and not lockstep),
    )


def phase_partition(name: str, columns: FlowColumns, *, group_size: int) -> PartitionSpec:
    """For the data plane, without the consumer ``train``, which the run's loop is."""
    return PartitionSpec(
        name,
        {column: _KINDS[column] for column in columns.all},
        {consumer: reads for consumer, reads in columns.consumers.items() if consumer != TRAIN},
        group_size,
        TOKENS,
        dict(columns.writes),
        columns.by_row,
    )
