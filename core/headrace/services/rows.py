"""The rows of a phase in the data plane: what storage units tell of them becomes what the flow counts.

Before the phase begins its rows are those of a checkpoint, if any, which the flow has counted; they are put back, and
again where a unit was lost that had them. Invariant: a row is kept by a unit only after the flow has counted it, and
every consumer is offered only what is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from headrace.contract import Array
from headrace.contract.columns import REWARD, VERSION
from headrace.dataplane import Note, Noted, PartitionLedger, PartitionSpec
from headrace.errors import ContractError, HeadraceError
from headrace.flow import STORED, Flow, Lease
from headrace.services.groups import StoredRows
from headrace.services.messages import TrainCall

STARTED, FINISHED = "started", "finished"
"""Tags of what a stage puts: when it began and ended to work on a row, unix seconds."""
_NONE = np.empty(0, dtype=np.int64)


class Desk(Protocol):
    """Who hears of rows."""

    def stored(self, rows: StoredRows) -> Array:
        """First columns of rows; int8 [n], 0 for those to keep."""

    def staged(self, stage: str, rows: Array, *, started: float, finished: float) -> None:
        """A stage has added its columns to rows. Unix seconds, of its clock."""

    def unit_lost(self, unit: int) -> None:
        """A storage unit is gone."""

    def unkept(self, groups: list[int]) -> None:
        """A storage unit could not keep rows of these groups."""

    def fail(self, error: HeadraceError) -> None:
        """What may not have happened has."""

    def pump(self) -> None:
        """Something has become possible."""


class PhaseRows(PartitionLedger):
    """``spec``: of the phase's partition, without the consumer ``train``: the run's loop takes batches of ``flow``."""

    def __init__(self, spec: PartitionSpec, flow: Flow, desk: Desk) -> None:
        super().__init__(spec, flow.ledger)
        self._flow = flow
        self._desk = desk
        self._stages = {frozenset(columns): stage for stage, columns in spec.writes.items()}
        self._first = tuple(column for column in spec.columns if not any(column in s for s in self._stages))
        self._begun = False
        self.displaced = 0
        """Units that were lost while rows were put back."""

    def begin(self) -> None:
        """The phase begins: all rows that there were are back."""
        self._begun = True

    def whereabouts(self, rows: Array) -> dict[str, Any]:
        """The ``partition`` and ``columns`` of rows that are complete, and ``units``: int16 [rows, columns], which unit
        has each."""
        columns, units = tuple(self.spec.columns), self.ledger.units_of(rows)
        return {"partition": self.spec.name, "columns": columns, "units": units}

    def for_checkpoint(self, rows: Array) -> dict[str, Any]:
        """:meth:`whereabouts` of rows that are stored, with the columns that a checkpoint keeps: those that no stage
        adds. What stages had added, their nodes add again."""
        found, count = self.whereabouts(rows), len(self._first)
        return {**found, "columns": self._first, "units": found["units"][:, :count]}

    def train_call(self, version: int, groups: Sequence[int], *, last: bool) -> TrainCall:
        """Where the trainer finds the rows of groups, which are the batch of ``version`` or the rest of it."""
        rows = self.ledger.rows_of(np.array(groups, dtype=np.int64))
        return TrainCall(version=version, last=last, rows=rows, **self.whereabouts(rows))

    def note(self, note: Note, unit: int) -> Noted:
        if not self._begun:
            return self._note_returned(note, unit)
        if note.rows is None:
            raise ContractError(
                f"rows of partition {self.spec.name!r} are dispatched by the run that it belongs to",
                fix="put columns of rows that were dispatched",
            )
        try:
            outcome = self._note(note, note.rows, unit)
            return Noted(refused=outcome if outcome.any() else None)
        except HeadraceError as error:
            self._desk.fail(error)
            raise
        finally:
            self._desk.pump()

    def _note(self, note: Note, rows: Array, unit: int) -> Array:
        if note.tags is None:
            raise ContractError(
                f"columns {', '.join(note.columns)} of partition {self.spec.name!r} came without their tags",
                fix="have them put by a worker or by a stage of the run that the partition belongs to",
            )
        if (stage := self._stages.get(frozenset(note.columns))) is not None:
            return self._staged(stage, note, note.tags, rows, unit)
        return self._desk.stored(
            StoredRows(
                trajectories=rows.tolist(),
                producer=note.producer,
                versions=note.tags[VERSION].tolist(),
                tokens=note.tokens.tolist(),
                nbytes=note.nbytes.tolist(),
                rewards=note.tags[REWARD].tolist(),
                unit=unit,
            )
        )

    def _staged(self, stage: str, note: Note, tags: Mapping[str, Array], rows: Array, unit: int) -> Array:
        outcome = self._flow.added(rows, note.columns, nbytes=note.nbytes, unit=unit)
        if (added := outcome == STORED).any():
            started, finished = float(tags[STARTED].min()), float(tags[FINISHED].max())
            self._desk.staged(stage, rows[added], started=started, finished=finished)
        return outcome

    def expire(self, now: float) -> tuple[Lease, ...]:
        return self._flow.expire(now)

    def lose(self, unit: int) -> Array:
        if self._begun:
            self._desk.unit_lost(unit)
        else:
            self.ledger.displace(unit)
            self.displaced += 1
        return _NONE  # the flow has the groups freed

    def give_up(self, groups: Array, *, new: bool) -> Array:
        self._desk.unkept(groups.tolist())
        return _NONE
