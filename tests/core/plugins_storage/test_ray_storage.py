"""Against a stand-in for Ray's store; the engine tests of the storage contract have the real one."""

from __future__ import annotations

import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.contract import Array, Batch, Column, Ragged
from headrace.errors import PluginError, RunError
from headrace_storage.ray import RayStorage


class RayError(Exception):
    """As Ray's."""


class Reference:
    """As Ray's: the object is freed with it."""

    def __init__(self, values: Array) -> None:
        self.values = values.copy()
        self.values.flags.writeable = False


class FakeRay(ModuleType):
    """Keeps objects, and counts those that somebody refers to."""

    __version__ = "0"

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.objects: weakref.WeakSet[Reference] = weakref.WeakSet()
        self.options: list[dict[str, Any]] = []
        self.full = self.running = self.empty = False

    def is_initialized(self) -> bool:
        return self.running

    def init(self, **options: Any) -> None:
        self.options.append(options)
        if options["address"] == "nowhere:1":
            raise ConnectionError("no cluster there")
        self.running = True

    def shutdown(self) -> None:
        self.running = False

    def put(self, values: Array) -> Reference:
        if self.full:
            raise RayError("the store is full")
        reference = Reference(values)
        self.objects.add(reference)
        return reference

    def get(self, references: list[Reference]) -> list[Array]:
        if self.empty:
            raise RayError("the object is lost")
        return [reference.values for reference in references]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    module = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", module)
    return module


def batch(rows: list[int]) -> Batch:
    columns: dict[str, Column] = {
        "tokens": Ragged.from_arrays([np.full(row, row, np.int32) for row in rows]),
        "reward": np.array(rows, np.float32),
    }
    return Batch(rows=np.array(rows, np.int64), columns=columns)


def test_an_object_per_column_of_a_put_goes_with_its_last_row(ray: FakeRay) -> None:
    storage = RayStorage(RayStorage.Settings())
    storage.put(batch([1, 2, 3]))
    storage.put(batch([4]))
    assert len(ray.objects) == 4
    got = storage.get([4, 1, 3], ["tokens", "reward"])
    assert [part.tolist() for part in got.ragged("tokens")] == [[4] * 4, [1], [3] * 3]
    got.dense("reward")[:] = 0
    assert storage.get([4, 1], ["reward"]).dense("reward").tolist() == [4, 1]
    storage.delete([1, 2])
    assert len(ray.objects) == 4
    storage.delete([3])
    assert len(ray.objects) == 2
    storage.close()
    assert len(ray.objects) == 0


def test_ray_that_was_started_here_is_ended_and_ray_that_runs_is_used(ray: FakeRay) -> None:
    mine = RayStorage(RayStorage.Settings(object_store_bytes=1 << 20))
    assert not ray.options, "making a storage starts nothing"
    mine.put(batch([1]))
    assert ray.options == [{"address": "local", "include_dashboard": False, "log_to_driver": False, **size()}]
    other = RayStorage(RayStorage.Settings(address="auto"))
    other.put(batch([1]))
    other.close()
    assert (len(ray.options), ray.running) == (1, True)
    mine.close()
    mine.close()
    assert not ray.running


def size() -> dict[str, int]:
    return {"object_store_memory": 1 << 20}


def test_a_cluster_that_is_not_there_is_said(ray: FakeRay) -> None:
    with pytest.raises(RunError, match="Ray 0 does not start: no cluster there"):
        RayStorage(RayStorage.Settings(address="nowhere:1")).put(batch([1]))


def test_a_full_store_refuses_a_put_and_loses_nothing(ray: FakeRay) -> None:
    storage = RayStorage(RayStorage.Settings())
    storage.put(batch([1]))
    before = storage.stats()
    ray.full = True
    with pytest.raises(RunError, match="does not take the 8 bytes of column 'tokens': the store is full"):
        storage.put(batch([2]))
    assert storage.stats() == before
    assert storage.get([1], ["reward"]).dense("reward").tolist() == [1]
    ray.empty = True
    with pytest.raises(KeyError, match="Ray has lost values of 1 rows"):
        storage.get([1], ["reward"])


def test_without_ray_the_first_put_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PluginError, match="needs the package ray") as caught:
        RayStorage(RayStorage.Settings()).put(batch([1]))
    assert 'pip install "headrace[ray]"' in caught.value.fix


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError):
        RayStorage.Settings(address="auto", object_store_bytes=1)
