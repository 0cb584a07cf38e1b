"""What a storage unit has moved, column by column: which of them a pipeline pays for, and on which way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from headrace.contract import Placed, Ragged, Repeated
from headrace.dataplane.contents import Value

PUT, SENT, MAPPED = "put", "sent", "mapped"
"""By producers; to consumers, in messages; to consumers that were told where it lies in shared memory."""


class Traffic:
    """Bytes since the unit started."""

    def __init__(self) -> None:
        self._moved: Counter[tuple[str, str, str]] = Counter()

    def add(self, hop: str, partition: str, columns: Mapping[str, Value] | Mapping[str, Placed]) -> None:
        """These values went that way."""
        for name, column in columns.items():
            shared = column.values if isinstance(column, Repeated) else column
            self._moved[hop, partition, name] += (shared.values if isinstance(shared, Ragged) else shared).nbytes

    def so_far(self) -> list[tuple[str, str, str, int]]:
        """Way, partition, column, bytes."""
        return [(*which, nbytes) for which, nbytes in self._moved.items()]
