"""A put on its way: from what was checked to what its producer is told."""

from __future__ import annotations

from headrace.contract import Region
from headrace.dataplane.messages import Note, Noted, Put
from headrace.dataplane.schema import Schema
from headrace.wire import Promise


class Pending:
    """A put that is not kept yet. ``region``: where its values lie already, if they do."""

    __slots__ = ("_end", "_promise", "nbytes", "note", "put", "region", "schema")

    schema: Schema
    """What it was compared with."""
    note: Note
    """What the ledger is told of it."""
    nbytes: int
    """Of all its values."""

    def __init__(self, put: Put, region: Region | None) -> None:
        self.put, self.region = put, region
        self._end: Noted | BaseException | None = None
        self._promise: Promise[Noted] | None = None

    def check(self, schema: Schema) -> None:
        """ContractError where it is not what the schema says."""
        self.note, self.nbytes = schema.check(self.put)
        self.schema = schema

    @property
    def given_up(self) -> bool:
        """Nobody waits for it any more, as was said."""
        return self._promise is not None and self._promise.done()

    def is_awaited(self) -> bool:
        """Whether somebody waits for it, as far as can be found out."""
        return self._promise is None or self._promise.is_awaited()

    def answer(self) -> Noted | Promise[Noted]:
        """What became of it, or a promise of that."""
        if self._end is None:
            return self.promise()
        if isinstance(self._end, BaseException):
            raise self._end
        return self._end

    def promise(self) -> Promise[Noted]:
        """Of what becomes of it, which nobody knows yet."""
        if self._promise is None:
            self._promise = Promise()
        return self._promise

    def end(self, end: Noted | BaseException) -> None:
        """It is kept, or why not."""
        self._end = end
        if self._promise is None or self._promise.done():
            return
        if isinstance(end, BaseException):
            self._promise.set_exception(end)
        else:
            self._promise.set_result(end)
