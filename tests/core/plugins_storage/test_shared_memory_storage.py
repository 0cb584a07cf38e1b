from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from headrace.contract import Array, Batch, Column, Placed, Ragged, Region
from headrace.errors import ConfigError, ContractError, RunError
from headrace_storage.shared_memory import SharedMemoryStorage
from support.storing import Storing

SEGMENT = 1 << 16
IMAGE = 1 << 12
KILLED = """
import os, signal, sys
import numpy as np
from headrace.contract import Batch
from headrace_storage.shared_memory import SharedMemoryStorage

storage = SharedMemoryStorage(SharedMemoryStorage.Settings(directory=sys.argv[1], segment_bytes=4096))
storage.put(Batch(rows=np.arange(1), columns={"reward": np.ones(1)}))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., SharedMemoryStorage]]:
    """Makes storages in ``tmp_path``."""
    storages = []

    def make(*, spare_bytes: int = 1 << 20) -> SharedMemoryStorage:
        table = SharedMemoryStorage.Settings(directory=str(tmp_path), segment_bytes=SEGMENT, spare_bytes=spare_bytes)
        storages.append(SharedMemoryStorage(table))
        return storages[-1]

    yield make
    for storage in storages:
        storage.close()


@pytest.fixture
def storage(made: Callable[..., SharedMemoryStorage]) -> SharedMemoryStorage:
    return made()


def batch(rows: list[int], **columns: Column) -> Batch:
    return Batch(rows=np.array(rows, np.int64), columns=columns)


def images(rows: list[int]) -> Array:
    return np.stack([np.full(IMAGE, row % 256, np.uint8) for row in rows])


def segments(storage: SharedMemoryStorage) -> list[str]:
    return sorted(path.name for path in Path(storage.directory).glob("*.values"))


def mapped(storage: SharedMemoryStorage) -> Callable[[str], Array]:
    """As another process would."""
    return lambda name: np.memmap(Path(storage.directory) / name, np.uint8, "r+")


def owner(storage: SharedMemoryStorage, name: str) -> AbstractContextManager[Any]:
    """Lives until its end."""
    file = (Path(storage.directory) / name).open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def placed(region: Region, values: Array, *, at: int = 0) -> Placed:
    return Placed(
        like=values[:0],
        count=len(values),
        lengths=None,
        segments=(region.segment,),
        runs=np.array([[0, region.offset + at, values.nbytes]]),
    )


def reserved(storage: SharedMemoryStorage, nbytes: int, owner: str) -> Region:
    region = storage.reserve(nbytes, owner=owner)
    assert region is not None
    return region


def test_what_a_producer_wrote_is_adopted_where_it_lies_and_found_there(storage: SharedMemoryStorage) -> None:
    with owner(storage, "producer"):
        region = reserved(storage, 3 * IMAGE, "producer")
        values = images([5, 6, 7])
        place = placed(region, values)
        writing = place.column(mapped(storage))
        assert isinstance(writing, np.ndarray)
        writing[:] = values
        opened = storage.open(region, {"image": place})
        assert isinstance(opened["image"], np.ndarray)
        assert (opened["image"] == values).all()
        assert storage.adopt(region, np.array([5, 6, 7])) == values.nbytes
    assert (storage.get([7, 5], ["image"]).dense("image")[:, 0] == [7, 5]).all()
    found = storage.locate([5, 6, 7], ["image"])["image"]
    assert found.runs.tolist() == [[0, region.offset, values.nbytes]], "rows that lie side by side are one run"
    assert storage.locate([7, 5], ["image"])["image"].runs.tolist() == [
        [0, region.offset + 2 * IMAGE, IMAGE],
        [0, region.offset, IMAGE],
    ]


def test_what_was_put_in_a_message_is_found_as_well(storage: SharedMemoryStorage) -> None:
    tokens = Ragged.from_arrays([np.arange(n, dtype=np.int32) for n in (3, 0, 2)])
    storage.put(batch([1, 2, 3], tokens=tokens, reward=np.array([1.0, 2.0, 3.0])))
    found = storage.locate([3, 2, 1], ["tokens", "reward"])
    read = {name: where.column(mapped(storage)) for name, where in found.items()}
    assert [part.tolist() for part in read["tokens"]] == [[0, 1], [], [0, 1, 2]]
    assert read["reward"].tolist() == [3, 2, 1]  # type: ignore[union-attr]  # it is dense
    with pytest.raises(KeyError, match="row 4 has no column 'reward'"):
        storage.locate([1, 4], ["reward"])


def test_bytes_of_deleted_rows_are_used_again(storage: SharedMemoryStorage) -> None:
    for start in range(0, 1000, 10):
        rows = list(range(start, start + 10))
        storage.put(batch(rows, image=images(rows), reward=np.zeros(10)))
        storage.delete(rows[::2])
        storage.delete(rows[1::2])
    assert storage.stats().nbytes == 0
    assert len(segments(storage)) == 1


def test_one_large_value_that_is_left_holds_only_its_own_bytes(storage: SharedMemoryStorage) -> None:
    rows = SEGMENT // IMAGE
    storage.put(batch(list(range(rows)), image=images(list(range(rows)))))
    storage.delete(list(range(1, rows)))
    storage.put(batch(list(range(100, 99 + rows)), image=images(list(range(rows - 1)))))
    assert len(segments(storage)) == 1
    assert storage.get([0], ["image"]).dense("image")[0, 0] == 0


def test_memory_that_is_free_goes_back_to_the_system_beyond_what_may_be_spare(
    made: Callable[..., SharedMemoryStorage],
) -> None:
    storage = made(spare_bytes=SEGMENT)
    rows = list(range(3 * SEGMENT // IMAGE))
    for row in rows:
        storage.put(batch([row], image=images([row])))
    assert len(segments(storage)) == 3
    storage.delete(rows)
    assert len(segments(storage)) == 1


def test_a_put_that_is_larger_than_a_segment_has_one_of_its_own(storage: SharedMemoryStorage) -> None:
    rows = list(range(3 * SEGMENT // IMAGE))
    storage.put(batch(rows, image=images(rows)))
    assert len(storage.locate(rows, ["image"])["image"].runs) == 1


def test_an_owners_next_reservation_frees_what_it_did_not_use(storage: SharedMemoryStorage) -> None:
    with owner(storage, "producer"):
        first = reserved(storage, IMAGE, "producer")
        second = reserved(storage, IMAGE, "producer")
        assert second.offset == first.offset
        with pytest.raises(ContractError, match="is not reserved, or not any more"):
            storage.open(first, {"image": placed(first, images([1]))})


def test_what_an_owner_that_died_had_reserved_is_free_and_what_a_living_one_reserved_is_not(
    storage: SharedMemoryStorage,
) -> None:
    with owner(storage, "other"):
        with owner(storage, "producer"):
            dying = reserved(storage, IMAGE, "producer")
            assert reserved(storage, IMAGE, "other").offset != dying.offset
        assert reserved(storage, 2 * IMAGE, "other").offset == dying.offset, "both are free by now"


def test_an_opened_region_stays_until_it_is_adopted_or_abandoned(storage: SharedMemoryStorage) -> None:
    with owner(storage, "producer"):
        region = reserved(storage, IMAGE, "producer")
        storage.open(region, {"image": placed(region, images([1]))})
    with owner(storage, "other"):
        assert reserved(storage, IMAGE, "other").offset != region.offset
        storage.abandon(region)
        storage.abandon(region)
        assert reserved(storage, IMAGE, "other").offset == region.offset


def test_a_region_whose_columns_do_not_fit_is_still_open(storage: SharedMemoryStorage) -> None:
    storage.put(batch([1], image=np.zeros(1)))
    with owner(storage, "producer"):
        region = reserved(storage, IMAGE, "producer")
        storage.open(region, {"image": placed(region, images([2]))})
        with pytest.raises(ContractError, match="dense float64"):
            storage.adopt(region, np.array([2]))
        storage.abandon(region)
    assert storage.stats().rows == 1


def outside(place: Placed) -> Placed:
    return replace(place, runs=np.add(place.runs, [[0, 2 * IMAGE, 0]]))


def elsewhere(place: Placed) -> Placed:
    return replace(place, segments=("../lock",))


def in_pieces(place: Placed) -> Placed:
    return replace(place, runs=np.concatenate([place.runs, [[0, 0, 0]]]))


def short(place: Placed) -> Placed:
    return replace(place, runs=np.subtract(place.runs, [[0, 0, 1]]))


def negative(place: Placed) -> Placed:
    return replace(place, lengths=np.array([-1]))


@pytest.mark.parametrize("spoil", [outside, elsewhere, in_pieces, short, negative])
def test_a_column_that_is_not_one_run_inside_its_region_is_refused(
    storage: SharedMemoryStorage, spoil: Callable[[Placed], Placed]
) -> None:
    with owner(storage, "producer"):
        region = reserved(storage, 2 * IMAGE, "producer")
        with pytest.raises(ContractError, match="does not lie in Region"):
            storage.open(region, {"image": spoil(placed(region, images([1])))})
        place = placed(region, images([1]))
        with pytest.raises(ContractError, match="overlap"):
            storage.open(region, {"image": place, "other": place})
        storage.open(region, {"image": place, "other": placed(region, images([1]), at=IMAGE)})


@pytest.mark.parametrize("name", ["", "../producer"])
def test_an_owner_is_a_file_of_the_directory(storage: SharedMemoryStorage, name: str) -> None:
    with pytest.raises(ContractError, match="to be reserved for"):
        storage.reserve(1, owner=name)


def test_without_memory_nothing_is_reserved_or_put_and_nothing_lost(
    storage: SharedMemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put(batch([1], image=images([1])))
    before, names = storage.stats(), segments(storage)

    def full(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", full)
    assert storage.reserve(SEGMENT, owner="producer") is None
    rows = list(range(2, 2 + SEGMENT // IMAGE))
    with pytest.raises(RunError, match=r"find no room in the shared memory .* is still there") as caught:
        storage.put(batch(rows, image=images(rows)))
    assert "bound the storage unit's capacity" in caught.value.fix
    assert (storage.stats(), segments(storage)) == (before, names)
    assert storage.get([1], ["image"]).dense("image")[0, 0] == 1


def test_segments_are_this_users_alone_and_go_with_the_storage(storage: SharedMemoryStorage) -> None:
    storage.put(batch([1], image=images([1])))
    folder = Path(storage.directory)
    assert [path.stat().st_mode & 0o077 for path in (folder, *folder.glob("*.values"))] == [0, 0]
    storage.close()
    storage.close()
    assert not folder.exists()


def test_segments_of_a_unit_that_was_killed_are_removed_by_the_next(
    made: Callable[..., SharedMemoryStorage], tmp_path: Path
) -> None:
    alive = made()
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    other = made()
    assert {str(path) for path in tmp_path.iterdir()} == {alive.directory, other.directory}


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    for wrong in ({"directory": "values"}, {"spare_bytes": -1}, {"segment_bytes": 0}):
        with pytest.raises(ValueError):
            SharedMemoryStorage.Settings(**wrong)  # type: ignore[arg-type]
    absent = SharedMemoryStorage.Settings(directory=str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="no directory that this user can write to"):
        SharedMemoryStorage.preflight(absent, directory="", origin=lambda key: key)


class StoringInSharedMemory(Storing):
    scale = 100

    def make(self) -> SharedMemoryStorage:
        return SharedMemoryStorage(SharedMemoryStorage.Settings(segment_bytes=SEGMENT, spare_bytes=2 * SEGMENT))


test_it_is_a_dictionary_of_row_and_column = StoringInSharedMemory.TestCase
test_it_is_a_dictionary_of_row_and_column.settings = settings(max_examples=25, stateful_step_count=15)
