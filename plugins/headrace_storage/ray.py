"""Values in the object store of Ray: one object per column of a put, freed with the last of its rows.

What the store does with objects is Ray's business: it spills to disk what does not fit its memory, and a node of the
cluster that is lost takes its objects along.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

from headrace.contract import Array, Batch, Column, Storage, StorageStats
from headrace.errors import PluginError, RunError
from headrace_storage.columns import bounds
from headrace_storage.index import Index, Value, assemble, raw, runs


@dataclass(frozen=True, slots=True, eq=False)
class _Object:
    """Bytes in the store. Ray frees them when nobody has the reference."""

    reference: Any


class RayStorage(Storage):
    """Joins a cluster, or starts Ray in this process and ends it at ``close``, at the first put."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        """``address``: of a cluster, as ``ray.init`` takes it, "auto" for the one of this machine; empty: start one
        here. ``object_store_bytes``: memory of the store that is started here; 0 leaves it to Ray."""

        address: str = ""
        object_store_bytes: int = 0

        def __post_init__(self) -> None:
            if self.object_store_bytes < 0 or (self.address and self.object_store_bytes):
                raise ValueError("object_store_bytes is at least 0, and for a store that is started here")

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._settings = settings
        self._ray: Any = None
        self._started = False
        self._index: Index[_Object] = Index()

    def put(self, batch: Batch) -> int:
        rows = self._index.check(batch)
        if not rows or not batch.columns:
            return 0
        kept = {name: self._keep(name, raw(column)) for name, column in batch.columns.items()}
        stored = 0
        for name, column in batch.columns.items():
            places = bounds(column)
            self._index.keep(rows, name, column, zip(repeat(kept[name]), places[:-1], places[1:]))
            stored += places[-1]
        return stored

    def get(self, rows: Sequence[int], columns: Sequence[str]) -> Batch:
        found: dict[str, Column] = {}
        for name in columns:
            kind, values = self._index.find(rows, name)
            found[name] = assemble(kind, values, self._read(values))
        return Batch(rows=np.asarray(rows, dtype=np.int64), columns=found)

    def delete(self, rows: Sequence[int]) -> None:
        self._index.forget(rows)

    def stats(self) -> StorageStats:
        return self._index.stats()

    def close(self) -> None:
        self._index.clear()
        if self._started:
            self._ray.shutdown()
        self._started, self._ray = False, None

    # ------------------------------------------------------------ inside

    def _store(self) -> Any:
        if self._ray is None:
            self._ray = _import()
            if not self._ray.is_initialized():
                self._begin()
        return self._ray

    def _begin(self) -> None:
        options: dict[str, Any] = {"address": self._settings.address}
        if not self._settings.address:
            options = {"address": "local", "include_dashboard": False}
            if self._settings.object_store_bytes:
                options["object_store_memory"] = self._settings.object_store_bytes
        try:
            self._ray.init(log_to_driver=False, **options)
        except (OSError, RuntimeError, ValueError) as error:
            ray, self._ray = self._ray, None
            raise RunError(
                f"Ray {ray.__version__} does not start: {error}", fix="see that `ray status` finds the cluster"
            ) from error
        self._started = True

    def _keep(self, name: str, values: Array) -> _Object:
        store = self._store()
        try:
            return _Object(store.put(values))
        except store.exceptions.RayError as error:
            raise RunError(
                f"Ray does not take the {len(values)} bytes of column {name!r}: {error}; "
                "what was stored before is still there",
                fix="give Ray's object store more memory, or room to spill to",
            ) from error

    def _read(self, values: Sequence[Value[_Object]]) -> Array:
        """The bytes of these values, joined: a copy, since what Ray gives is read-only."""
        pieces = list(runs(values))
        objects = list(dict.fromkeys(place for place, _, _ in pieces))
        if not objects:
            return np.empty(0, np.uint8)
        store = self._store()
        try:
            fetched = store.get([place.reference for place in objects])
        except store.exceptions.RayError as error:
            raise KeyError(f"Ray has lost values of {len(values)} rows: {error}") from error
        found = dict(zip(objects, fetched, strict=True))
        return np.concatenate([found[place][start:stop] for place, start, stop in pieces])


def _import() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise PluginError(
            "storage 'ray' needs the package ray, which is not installed", fix='pip install "headrace[ray]"'
        ) from None
