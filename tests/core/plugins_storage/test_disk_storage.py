from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from headrace.contract import Array, Batch, Column, Ragged
from headrace.errors import ConfigError, ContractError, RunError
from headrace_storage.disk import DiskStorage
from support.storing import Storing

KILLED = """
import os, signal, sys
import numpy as np
from headrace.contract import Batch
from headrace_storage.disk import DiskStorage

storage = DiskStorage(DiskStorage.Settings(path=sys.argv[1]))
storage.put(Batch(rows=np.arange(1), columns={"reward": np.ones(1)}))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., DiskStorage]]:
    """Makes storages in ``tmp_path``, with small files."""
    storages = []

    def make(*, memory_bytes: int = 0, segment_bytes: int = 100) -> DiskStorage:
        table = DiskStorage.Settings(path=str(tmp_path), memory_bytes=memory_bytes, segment_bytes=segment_bytes)
        storages.append(DiskStorage(table))
        return storages[-1]

    yield make
    for storage in storages:
        storage.close()


def batch(rows: list[int], **columns: Column) -> Batch:
    return Batch(rows=np.array(rows, np.int64), columns=columns)


def images(rows: list[int]) -> Batch:
    """Of 100 bytes each."""
    return batch(rows, image=np.stack([np.full(100, row, np.uint8) for row in rows]))


def sizes(folder: Path) -> list[int]:
    return sorted(path.stat().st_size for path in folder.rglob("*.values"))


def held(storage: DiskStorage, row: int) -> Array:
    return storage.get([row], ["image"]).dense("image")[0]


def test_a_file_is_removed_when_nothing_in_it_lives(made: Callable[..., DiskStorage], tmp_path: Path) -> None:
    storage = made(segment_bytes=300)
    for row in range(9):
        storage.put(images([row]))
    assert sizes(tmp_path) == [300, 300, 300]
    storage.delete([0, 1, 2, 6, 7])
    assert sizes(tmp_path) == [300, 300]
    storage.delete([3, 4, 5, 8])
    assert sizes(tmp_path) == []
    storage.put(images([1]))
    assert held(storage, 1).tolist() == [1] * 100


def test_the_file_that_is_being_filled_is_removed_too(made: Callable[..., DiskStorage], tmp_path: Path) -> None:
    storage = made(segment_bytes=1000)
    storage.put(images([1, 2]))
    storage.delete([1, 2])
    assert sizes(tmp_path) == []


def test_what_is_left_of_a_file_that_is_mostly_dead_moves_to_another(
    made: Callable[..., DiskStorage], tmp_path: Path
) -> None:
    storage = made(segment_bytes=1000)
    storage.put(images(list(range(10))))
    storage.delete(list(range(8)))
    assert sizes(tmp_path) == [200]
    assert [held(storage, row)[0] for row in (8, 9)] == [8, 9]


def test_the_newest_values_stay_in_memory_and_older_ones_go_to_disk(
    made: Callable[..., DiskStorage], tmp_path: Path
) -> None:
    storage = made(memory_bytes=200, segment_bytes=1000)
    storage.put(images([1]))
    storage.put(images([2]))
    assert sizes(tmp_path) == []
    storage.put(images([3]))
    assert sizes(tmp_path) == [100]
    storage.put(images([4, 5, 6]))
    assert sizes(tmp_path) == [400], "what can never fit goes straight to disk"
    assert [held(storage, row)[0] for row in range(1, 7)] == [1, 2, 3, 4, 5, 6]


def test_what_is_deleted_before_it_is_old_never_goes_to_disk(made: Callable[..., DiskStorage], tmp_path: Path) -> None:
    storage = made(memory_bytes=250)
    for row in range(10):
        storage.put(images([row]))
        storage.delete([row])
    assert not any(tmp_path.iterdir())


def test_a_full_disk_refuses_a_put_and_loses_nothing(
    made: Callable[..., DiskStorage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = made(memory_bytes=100, segment_bytes=1000)
    storage.put(images([1]))
    storage.put(images([2]))
    before, room = storage.stats(), 30
    write = os.pwrite

    def until_full(file: int, data: bytes, at: int) -> int:
        if at + room > 100 + 2 * room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[:room], at)

    with monkeypatch.context() as full:
        full.setattr("os.pwrite", until_full)
        for refused in (images([3]), images([3, 4])):
            with pytest.raises(RunError, match=r"cannot be written to .*No space left.*is still there") as caught:
                storage.put(refused)
    assert "free space there, name another `path`" in caught.value.fix
    assert storage.stats() == before
    assert sizes(tmp_path) == [100], "nothing is left of what failed"
    storage.put(images([3]))
    assert [held(storage, row)[0] for row in (1, 2, 3)] == [1, 2, 3]


def test_a_value_that_is_replaced_in_its_own_file_is_there(made: Callable[..., DiskStorage], tmp_path: Path) -> None:
    storage = made(segment_bytes=150)
    for value in (1, 2, 3):
        storage.put(batch([7], image=np.full((1, 100), value, np.uint8), reward=np.array([float(value)])))
    assert held(storage, 7)[0] == 3
    assert storage.stats().nbytes == 108
    assert sum(sizes(tmp_path)) <= 2 * 108


def test_the_files_are_this_users_alone_and_go_with_the_storage(
    made: Callable[..., DiskStorage], tmp_path: Path
) -> None:
    storage = made()
    storage.put(images([1]))
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    storage.close()
    storage.close()
    assert not folder.exists()


def test_files_of_a_storage_that_was_killed_are_removed_by_the_next(
    made: Callable[..., DiskStorage], tmp_path: Path
) -> None:
    alive = made()
    alive.put(images([1]))
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    made().put(images([2]))
    assert len(list(tmp_path.iterdir())) == 2
    assert held(alive, 1)[0] == 1


def test_a_column_does_not_change_its_kind(made: Callable[..., DiskStorage]) -> None:
    storage = made()
    storage.put(images([1]))
    with pytest.raises(ContractError, match=r"column 'image' is dense uint8 \[100\], a put gave dense float64 \[\]"):
        storage.put(batch([2], image=np.zeros(1)))
    with pytest.raises(ContractError, match="have no bytes"):
        storage.put(batch([2], empty=Ragged(np.zeros((3, 0)), np.array([0, 3]))))
    with pytest.raises(ContractError, match="names a row twice"):
        storage.put(images([3, 3]))


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    for wrong in ({"path": "values"}, {"memory_bytes": -1}, {"segment_bytes": 0}):
        with pytest.raises(ValueError):
            DiskStorage.Settings(**wrong)  # type: ignore[arg-type]
    absent = DiskStorage.Settings(path=str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="no directory that this user can write to"):
        DiskStorage.preflight(absent, directory="", origin=lambda key: key)


class StoringOnDisk(Storing):
    def make(self) -> DiskStorage:
        return DiskStorage(DiskStorage.Settings(segment_bytes=700))


class StoringOnDiskAndInMemory(Storing):
    def make(self) -> DiskStorage:
        return DiskStorage(DiskStorage.Settings(segment_bytes=700, memory_bytes=1000))


test_on_disk_it_is_a_dictionary_of_row_and_column = StoringOnDisk.TestCase
test_on_disk_it_is_a_dictionary_of_row_and_column.settings = settings(max_examples=20, stateful_step_count=15)
test_spilling_it_is_a_dictionary_of_row_and_column = StoringOnDiskAndInMemory.TestCase
test_spilling_it_is_a_dictionary_of_row_and_column.settings = settings(max_examples=20, stateful_step_count=15)
