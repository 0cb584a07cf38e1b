from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import RunError
from headrace.wire import RecordWriter, decode, read_records

VALUES = [["first", 1], ["second", 2], ["third", 3]]


def write(path: Path) -> Path:
    with RecordWriter(path) as writer:
        for value in VALUES:
            writer.write(value)
        writer.commit()
    return path


def read(path: Path) -> list[object]:
    return [decode(frames, list) for frames in read_records(path)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whole") / "records")


def test_what_was_written_is_read_in_its_order_and_nothing_else_is_left(whole: Path) -> None:
    assert read(whole) == VALUES
    assert list(whole.parent.iterdir()) == [whole]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_file_with_any_bit_changed_is_refused(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(whole.read_bytes())
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (tmp_path / "records").write_bytes(damaged)
    with pytest.raises(RunError, match=r"is damaged or cut|is no file of records"):
        read(tmp_path / "records")


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_file_that_was_cut_is_refused_wherever(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    words = whole.read_bytes()
    (tmp_path / "records").write_bytes(words[: data.draw(st.integers(0, len(words) - 1))])
    with pytest.raises(RunError) as refused:
        read(tmp_path / "records")
    assert refused.value.fix == "use an older one, or a copy of it"
    assert refused.value.origin == str(tmp_path / "records")


def test_a_file_that_is_not_there_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be read: No such file or directory") as refused:
        read(tmp_path / "records")
    assert refused.value.fix == "name a file that is there, and that this user may read"


def test_a_file_that_goes_on_after_its_end_is_refused(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "records").write_bytes(whole.read_bytes() * 2)
    with pytest.raises(RunError, match="goes on after its end"):
        read(tmp_path / "records")


def test_records_that_changed_places_are_refused(tmp_path: Path) -> None:
    """Each is as it was written."""
    other = tmp_path / "other"
    with RecordWriter(other) as writer:
        for value in reversed(VALUES):
            writer.write(value)
        writer.commit()
    one, two = write(tmp_path / "one").read_bytes(), other.read_bytes()
    half = len(one) // 2
    (tmp_path / "records").write_bytes(one[:half] + two[half:])
    with pytest.raises(RunError, match="is damaged or cut"):
        read(tmp_path / "records")


def test_until_it_is_whole_the_name_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "records")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with RecordWriter(path) as writer:
        writer.write(["fourth", 4])
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(path)
    assert read(path) == VALUES
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"missing cannot be read: No such file"):
        read(tmp_path / "missing")
