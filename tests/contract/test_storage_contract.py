"""Every storage keeps the rules of its role."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.contract import NoSettings, Storage
from headrace.testing import FakeStorage
from headrace.testing.suites import StorageContract
from headrace_storage.disk import DiskStorage
from headrace_storage.memory import MemoryStorage
from headrace_storage.ray import RayStorage
from headrace_storage.shared_memory import SharedMemoryStorage


class TestMemoryStorage(StorageContract):
    @pytest.fixture
    def plugin(self) -> Storage:
        return MemoryStorage(NoSettings())


class TestDiskStorage(StorageContract):
    @pytest.fixture
    def plugin(self) -> Iterator[Storage]:
        storage = DiskStorage(DiskStorage.Settings())
        yield storage
        storage.close()


class TestDiskStorageWithMemory(StorageContract):
    @pytest.fixture
    def plugin(self) -> Iterator[Storage]:
        storage = DiskStorage(DiskStorage.Settings(memory_bytes=64))
        yield storage
        storage.close()


class TestSharedMemoryStorage(StorageContract):
    @pytest.fixture
    def plugin(self) -> Iterator[Storage]:
        storage = SharedMemoryStorage(SharedMemoryStorage.Settings(segment_bytes=1 << 20))
        yield storage
        storage.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One for all rules: it takes seconds to start."""
    ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    ray.init("local", include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


@pytest.mark.engine
@pytest.mark.usefixtures("cluster")
class TestRayStorage(StorageContract):
    @pytest.fixture
    def plugin(self) -> Iterator[Storage]:
        storage = RayStorage(RayStorage.Settings())
        yield storage
        storage.close()


class TestFakeStorage(StorageContract):
    @pytest.fixture
    def plugin(self) -> Storage:
        return FakeStorage(FakeStorage.Settings())
