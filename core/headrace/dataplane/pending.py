"""A put on its way: from what was checked to what its producer is told."""

from __future__ import annotations

import asyncio

from headrace.contract import Region
from headrace.dataplane.messages import Noted, Put
from headrace.dataplane.schema import Schema
from headrace.wire import Promise


class Pending:
    """A put that is not kept yet. ``note``: what the ledger is told of it; ``nbytes``: of all its values; ``region``:
    where they lie already, if they do."""

    __slots__ = ("_end", "_promise", "nbytes", "note", "put", "region", "schema")

    def __init__(self, put: Put, schema: Schema, region: Region | None) -> None:
        """ContractError where it is not what the schema says."""
        self.put, self.schema, self.region = put, schema, region
        self.note, self.nbytes = schema.check(put)
        self._end: Noted | BaseException | None = None
        self._promise: Promise[Noted] | None = None

    @property
    def given_up(self) -> bool:
        """Nobody waits for it any more."""
        return self._promise is not None and self._promise.done()

    def answer(self) -> Noted | asyncio.Future[Noted]:
        """What became of it, or a promise of that. Asked for once."""
        if self._end is None:
            self._promise = Promise()
            return self._promise
        if isinstance(self._end, BaseException):
            raise self._end
        return self._end

    def end(self, end: Noted | BaseException) -> None:
        """It is kept, or why not."""
        self._end = end
        if self._promise is None or self._promise.done():
            return
        if isinstance(end, BaseException):
            self._promise.set_exception(end)
        else:
            self._promise.set_result(end)
