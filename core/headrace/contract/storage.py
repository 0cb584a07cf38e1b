"""The ``storage`` role: column values of one storage unit. What may be read when is core's business."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.contract.columns import Batch
from headrace.contract.plugin import Plugin


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStats:
    """Rows with at least one column, and the bytes of all values."""

    rows: int
    nbytes: int


class Storage(Plugin, ABC):
    """Values by (row, column). Used from one thread."""

    @abstractmethod
    def put(self, batch: Batch) -> int:
        """Store every column of every row; other columns of these rows stay as they are. Returns the bytes stored.
        The arrays belong to the storage afterwards: it copies a view that would pin more memory than it needs.
        ContractError, and nothing stored, when the batch names a row twice or a column has another dtype or shape."""

    @abstractmethod
    def get(self, rows: Sequence[int], columns: Sequence[str]) -> Batch:
        """These columns of these rows, in this order. KeyError names an absent row or column."""

    @abstractmethod
    def delete(self, rows: Sequence[int]) -> None:
        """Free these rows; unknown ones are ignored."""

    @abstractmethod
    def stats(self) -> StorageStats:
        """O(1)."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; may be called twice."""
