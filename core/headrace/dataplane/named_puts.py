"""Puts that bear a name: one that is put again, since its answer did not come, is kept once.

Invariant: of the puts of one name that are remembered, one has made rows that are not lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headrace.contract import Array
from headrace.dataplane.messages import Noted
from headrace.errors import ContractError
from headrace.flow.group_table import DUPLICATE

REMEMBERED = 1 << 16
"""Names of a partition: the newest."""


class NamedPuts:
    """Of a partition, with groups of ``group_size``."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._rows: dict[str, tuple[int, int]] = {}
        """The first row that each put made, and how many; the oldest put first."""

    def find(self, name: str, count: int) -> Noted | None:
        """What whoever puts ``count`` rows under this name is told; None when nobody did before. ContractError for
        another number of rows than before."""
        known = self._rows.get(name)
        if known is None:
            return None
        if known[1] != count:
            raise ContractError(
                f"a put of {count} rows is named {name!r}, as one of {known[1]} was before",
                fix="give every put a name of its own, and the same to what is put again",
            )
        return Noted(known[0], np.full(count, DUPLICATE, dtype=np.int8))

    def add(self, name: str, first: int, count: int) -> None:
        """It has made rows."""
        if len(self._rows) >= REMEMBERED:
            del self._rows[next(iter(self._rows))]
        self._rows[name] = first, count

    def forget(self, groups: Array) -> bool:
        """Puts whose rows are of groups that were lost; whoever makes them anew may use their names again. Returns
        whether there were any. O(remembered)."""
        if not self._rows or not len(groups):
            return False
        rows = np.array(list(self._rows.values()))
        first, last = rows[:, 0] // self._group_size, (rows.sum(axis=1) - 1) // self._group_size
        in_order = np.sort(groups)
        gone = np.searchsorted(in_order, first) < np.searchsorted(in_order, last, side="right")
        for name in [name for name, is_gone in zip(self._rows, gone.tolist(), strict=True) if is_gone]:
            del self._rows[name]
        return bool(gone.any())

    def state(self) -> dict[str, tuple[int, int]]:
        """What another goes on with; a copy."""
        return dict(self._rows)

    def restore(self, state: Mapping[str, tuple[int, int]]) -> None:
        """Go on where an earlier one was."""
        self._rows.update(state)
