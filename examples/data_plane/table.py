"""What the three programs have in common: the table, and how much there is to do."""

from headrace.dataplane import ColumnSchema, PartitionSpec

GROUPS, GROUP_SIZE = 64, 4
"""Prompts, and answers to each."""
STEP_GROUPS = 8

SPEC = PartitionSpec(
    "answers",
    columns={"tokens": ColumnSchema("int32", ragged=True), "reward": ColumnSchema("float32")},
    consumers={"score": ("tokens",), "train": ("tokens", "reward")},
    group_size=GROUP_SIZE,
    length_of="tokens",
    by_row=("score",),  # an answer is scored when it is there; training waits for its whole group
)
