"""Every storage keeps the rules of its role."""

from __future__ import annotations

import pytest

from headrace.contract import NoSettings, Storage
from headrace.testing import FakeStorage
from headrace.testing.suites import StorageContract
from headrace_storage.memory import MemoryStorage


class TestMemoryStorage(StorageContract):
    @pytest.fixture
    def plugin(self) -> Storage:
        return MemoryStorage(NoSettings())


class TestFakeStorage(StorageContract):
    @pytest.fixture
    def plugin(self) -> Storage:
        return FakeStorage(FakeStorage.Settings())
