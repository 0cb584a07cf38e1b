"""A checkpoint is complete and as it was written, or it is not there."""

from __future__ import annotations

import errno
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.contract import Batch, Ragged
from headrace.errors import RunError
from headrace.flow.records import FlowState, StoredGroup
from headrace.observe.records import EvaluationRecord, EvaluationSample
from headrace.run import checkpoint as checkpoints
from headrace.run.checkpoint import RunState, complete, newest, prune, read, settle, staging
from headrace.run.tasks import TasksIdentity

ROWS = Batch(
    rows=np.array([6, 7], dtype=np.int64),
    columns={
        "tokens": Ragged.from_arrays([np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)]),
        "reward": np.array([0.5, np.nan], dtype=np.float32),
    },
)


def state(version: int) -> RunState:
    group = StoredGroup(group=3, version=1, oldest=1, tokens=(3, 2))
    sample = EvaluationSample(prompt="p", answer="a", reward=float("nan"))
    return RunState(
        directory="",
        events=17,
        tasks=TasksIdentity(sizes={"train": None, "evaluation": 8}, digest="t"),
        phase=0,
        step=version,
        model_path="model",
        digest="d",
        flow=FlowState(
            version=version, next_group=5, stored=(group,), unfinished=(4,), trained=6, dropped={"worker_lost": 2}
        ),
        skipped_in_a_row=1,
        quarantine=[3],
        prompts=4,
        samples=8,
        optimizer_steps=2,
        evaluations={0: {"evaluation/greedy_accuracy": None, "evaluation/sampled_accuracy": 0.25}},
        samples_before={"greedy": EvaluationRecord(version=0, mode="greedy", samples=[sample])},
        rolled_out=True,
    )


def write(root: Path, version: int = 1) -> Path:
    path = root / f"version-{version:08d}"
    hidden = staging(path)
    (hidden / "trainer" / "part").mkdir(parents=True)
    (hidden / "trainer" / "weights").write_bytes(bytes(range(256)))
    (hidden / "trainer" / "part" / "optimizer").write_bytes(b"moments")
    complete(hidden, path, state(version), [ROWS, ROWS])
    return path


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_was_written_is_read(tmp_path: Path) -> None:
    found = read(write(tmp_path))
    assert found.state.flow == state(1).flow
    assert found.state.evaluations == state(1).evaluations
    assert found.state.samples_before["greedy"].samples[0].reward is None
    first, second = found.rows()
    assert first.rows.tolist() == second.rows.tolist() == [6, 7]
    assert first.ragged("tokens")[1].tolist() == [0, 1]
    np.testing.assert_array_equal(first.dense("reward"), ROWS.dense("reward"))
    assert (found.trainer / "weights").read_bytes() == bytes(range(256))
    assert names(tmp_path) == ["version-00000001"]


# ---------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whole"))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_checkpoint_with_any_byte_changed_is_refused(whole: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(sorted(path for path in whole.rglob("*") if path.is_file())))
    was = file.read_bytes()
    place, change = data.draw(st.integers(0, len(was) - 1)), data.draw(st.integers(1, 255))
    changed = bytearray(was)
    changed[place] ^= change
    file.write_bytes(changed)
    try:
        with pytest.raises(RunError):
            read(whole)
    finally:
        file.write_bytes(was)
    read(whole)


def test_a_checkpoint_without_any_one_of_its_files_is_refused(whole: Path, tmp_path: Path) -> None:
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    assert len(files) == 5
    for number, file in enumerate(files):
        copy = tmp_path / str(number)
        shutil.copytree(whole, copy)
        (copy / file).unlink()
        with pytest.raises(RunError, match=r"cannot be read|differ by"):
            read(copy)


def test_a_checkpoint_with_a_file_that_was_not_written_with_it_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    (path / "more.bin").write_bytes((path / "rows.bin").read_bytes())
    with pytest.raises(RunError, match=r"differ by more\.bin"):
        read(path)


@pytest.mark.parametrize("file", ["manifest.json", "state.json"])
def test_a_checkpoint_whose_words_are_no_text_is_refused(tmp_path: Path, file: str) -> None:
    path = write(tmp_path)
    words = (path / file).read_bytes()
    (path / file).write_bytes(words.replace(b"a", b"\xe1", 1))
    with pytest.raises(RunError, match="version-00000001"):
        read(path)


def test_a_checkpoint_cut_short_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    weights = path / "trainer" / "weights"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(RunError, match="weights is not what was written"):
        read(path)


# ---------------------------------------------------------------- a disk that refuses


@pytest.mark.parametrize("refused", ["state.json", "manifest.json"])
def test_a_write_that_fails_half_way_leaves_nothing_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    writes = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == refused:
            writes(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return writes(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match="version-00000001 cannot be written: No space left on device") as stopped:
        write(tmp_path)
    assert "[checkpoint] keep" in stopped.value.fix
    assert names(tmp_path) == []


def test_a_sync_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(RunError, match="Input/output error"):
        write(tmp_path)
    assert names(tmp_path) == []


def test_a_directory_that_may_not_be_written_is_said_to_be_so(tmp_path: Path) -> None:
    blocked = tmp_path / "checkpoints"
    blocked.write_text("a file")
    with pytest.raises(RunError, match="cannot be written: Not a directory"):
        staging(blocked / "version-00000001")


FULL = """
import resource, signal, sys
from pathlib import Path
import test_checkpoints as t
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
try:
    t.write(Path(sys.argv[1]))
except t.RunError as error:
    print(error)
"""


def test_a_file_that_grows_past_what_the_system_allows_leaves_nothing(tmp_path: Path) -> None:
    where = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True, cwd=where
    )
    assert "cannot be written: File too large" in done.stdout
    assert names(tmp_path) == []


def test_every_file_and_directory_is_on_disk_before_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(checkpoints, "sync", synced.append)
    path = write(tmp_path)
    hidden = tmp_path / ".version-00000001.partial"
    assert set(synced[:-1]) == {hidden, *(hidden / found.relative_to(path) for found in path.rglob("*"))}
    assert synced[-1] == tmp_path


def test_what_an_interrupted_attempt_left_is_no_part_of_the_next(tmp_path: Path) -> None:
    left = staging(tmp_path / "version-00000001")
    (left / "rows-9.bin").write_bytes(b"old")
    assert not (write(tmp_path) / "rows-9.bin").exists()
    assert names(tmp_path) == ["version-00000001"]


# ---------------------------------------------------------------- which one


def test_the_newest_whole_one_is_taken_and_damaged_ones_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [write(tmp_path, version) for version in (1, 2, 3)]
    (paths[2] / "state.json").write_bytes(b"{}")
    with caplog.at_level(logging.WARNING):
        found = newest(tmp_path, in_force=[path.name for path in paths])
    assert found.path == paths[1]
    assert "version-00000003" in caplog.text


def test_the_newest_is_the_one_that_the_log_named_last(tmp_path: Path) -> None:
    earlier, later = write(tmp_path, 2), write(tmp_path, 1)
    assert newest(tmp_path, in_force=[earlier.name, later.name]).path == later


def test_one_that_the_log_does_not_name_is_skipped(tmp_path: Path) -> None:
    first, _ = write(tmp_path, 1), write(tmp_path, 2)
    assert newest(tmp_path, in_force=[first.name]).path == first


def test_without_a_whole_one_there_is_nothing_to_resume(tmp_path: Path) -> None:
    staging(tmp_path / "version-00000002")
    with pytest.raises(RunError, match="no whole checkpoint") as stopped:
        newest(tmp_path, in_force=["version-00000002"])
    assert "start the job anew" in stopped.value.fix


def test_when_all_are_damaged_that_is_said_and_not_how_often_they_are_written(tmp_path: Path) -> None:
    paths = [write(tmp_path, version) for version in (1, 2)]
    for path in paths:
        (path / "state.json").write_bytes(b"{}")
    with pytest.raises(RunError, match=r"no whole .* damaged \(version-00000002, version-00000001\)") as stopped:
        newest(tmp_path, in_force=[path.name for path in paths])
    assert "from a copy" in stopped.value.fix
    assert "every" not in stopped.value.fix


@pytest.mark.parametrize("in_force", [[], ["version-00000001"]], ids=["none in force", "a damaged one in force"])
def test_checkpoints_that_are_whole_and_not_in_force_are_named(tmp_path: Path, in_force: list[str]) -> None:
    damaged, _ = write(tmp_path, 1), write(tmp_path, 2)
    (damaged / "state.json").write_bytes(b"{}")
    with pytest.raises(RunError, match=r"does not say that others were written, or .* void \(.*00000002\)") as stopped:
        newest(tmp_path, in_force=in_force)
    assert "put the whole events.jsonl back" in stopped.value.fix


def rewritten(path: Path, **changed: Any) -> None:
    """Another version's: whole, with other words in it."""
    told = {**msgspec.json.decode((path / "state.json").read_bytes()), **changed}
    shutil.rmtree(path)
    hidden = staging(path)
    complete(hidden, path, told, [])  # type: ignore[arg-type]  # what another version calls a state


@pytest.mark.parametrize("changed", [{"format": 3}, {"format": 3, "flow": None, "step": "other words"}])
def test_one_of_another_format_is_refused_with_what_to_do_and_no_older_one_is_taken(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    first, second = write(tmp_path, 1), write(tmp_path, 2)
    rewritten(second, **changed)
    with pytest.raises(RunError, match="has format 3, expected 2") as stopped:
        newest(tmp_path, in_force=[first.name, second.name])
    assert stopped.value.fix == "resume with the version of Headrace that wrote it"


def test_one_that_is_whole_and_not_understood_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path)
    rewritten(path, step="other words")
    with pytest.raises(RunError, match="whole and not understood") as stopped:
        newest(tmp_path, in_force=[path.name])
    assert stopped.value.fix == "resume with the version of Headrace that wrote it"


def test_one_of_the_same_name_is_of_a_log_that_lost_its_end_and_gives_way(tmp_path: Path) -> None:
    old = write(tmp_path)
    (old / "rows-9.bin").write_bytes(b"old")
    read(write(tmp_path))
    assert names(tmp_path) == ["version-00000001"]


# ---------------------------------------------------------------- which are kept


@pytest.mark.parametrize("keep", [1, 2, 3, 9])
def test_the_newest_n_are_kept(tmp_path: Path, keep: int) -> None:
    paths = [write(tmp_path, version) for version in (8, 9, 10, 11)]
    prune(tmp_path, in_force=[path.name for path in paths], keep=keep)
    assert names(tmp_path) == [path.name for path in paths[-keep:]]


@pytest.mark.parametrize("keep", [1, 2])
def test_void_and_unannounced_ones_are_removed_and_do_not_count(tmp_path: Path, keep: int) -> None:
    """The run was resumed from 8, since 10 was damaged, stopped at 9, and died before it said so of 11."""
    old, _, new, _ = write(tmp_path, 8), write(tmp_path, 10), write(tmp_path, 9), write(tmp_path, 11)
    prune(tmp_path, in_force=[old.name, new.name], keep=keep)
    assert names(tmp_path) == [old.name, new.name][-keep:]


def test_what_was_removed_before_does_not_count(tmp_path: Path) -> None:
    old, gone, new = write(tmp_path, 8), write(tmp_path, 9), write(tmp_path, 10)
    shutil.rmtree(gone)
    prune(tmp_path, in_force=[path.name for path in (old, gone, new)], keep=2)
    assert names(tmp_path) == [old.name, new.name]


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    staging(tmp_path / "version-00000002")
    prune(tmp_path, in_force=[write(tmp_path).name], keep=1)
    assert names(tmp_path) == ["version-00000001"]


def test_an_announcement_that_the_disk_refuses_is_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "events.jsonl").touch()
    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(RunError, match="version-00000001 cannot be written: Input/output error"):
        settle(tmp_path / "version-00000001", tmp_path / "events.jsonl")
