"""The event log: what is written is what is read, and nothing else can be written."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.errors import RunError
from headrace.observe.event_log import EventLog
from headrace.observe.events import FIELDS, RunStarted, VersionRetired, read_events
from headrace.observe.lines import RecordLog
from headrace.observe.records import read_evaluations, read_metrics


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    with EventLog(tmp_path / "events.jsonl") as log:
        yield log


def test_events_are_numbered_and_read_back_typed(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        first = log.emit("run_started", job="toy", seed=7, instances=["rollout-0"], phases=["only"])
        log.emit("version_retired", version=3)
    one, two = read_events(tmp_path)
    assert isinstance(one, RunStarted)
    assert (one.seq, one.epoch, one.job, one.instances) == (0, 0, "toy", ["rollout-0"])
    assert one.time == first["time"]
    assert isinstance(two, VersionRetired)
    assert (two.seq, two.version) == (1, 3)
    assert log.count == 2


def test_emit_returns_the_line_that_it_wrote(log: EventLog, tmp_path: Path) -> None:
    event = log.emit("trajectory_scored", trajectory=1, reward=0.5)
    assert msgspec.json.decode((tmp_path / "events.jsonl").read_bytes()) == event


def test_an_event_is_on_disk_when_emit_returns(log: EventLog, tmp_path: Path) -> None:
    for version in range(3):
        log.emit("version_retired", version=version)
        assert [e.version for e in read_events(tmp_path) if isinstance(e, VersionRetired)] == list(range(version + 1))


def test_an_unknown_kind_is_refused(log: EventLog) -> None:
    with pytest.raises(ValueError, match="no event kind 'run_began'; kinds: batch_released, batch_taken"):
        log.emit("run_began")


def test_missing_and_unknown_fields_are_refused_and_nothing_is_written(log: EventLog, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing fields \['version'\], unknown fields \['versoin'\]"):
        log.emit("version_retired", versoin=3)
    assert list(read_events(tmp_path)) == []


def test_numpy_numbers_are_numbers(log: EventLog, tmp_path: Path) -> None:
    log.emit("version_retired", version=np.int64(3))
    log.emit("trajectory_scored", trajectory=np.int32(1), reward=np.float32(0.5))
    assert [msgspec.structs.asdict(e).get("version", 1) for e in read_events(tmp_path)] == [3, 1]


def test_a_reward_that_is_no_number_is_written_as_null(log: EventLog, tmp_path: Path) -> None:
    log.emit("trajectory_scored", trajectory=1, reward=math.nan)
    (event,) = read_events(tmp_path)
    assert event == msgspec.convert(
        {"seq": 0, "time": event.time, "epoch": 0, "kind": "trajectory_scored", "trajectory": 1, "reward": None},
        type(event),
    )


def test_a_log_is_never_overwritten(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl").close()
    with pytest.raises(RunError, match="written by one run only"):
        EventLog(tmp_path / "events.jsonl")


def test_a_log_in_an_absent_directory_is_refused_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot create") as caught:
        EventLog(tmp_path / "absent" / "events.jsonl")
    assert "writable" in caught.value.fix


def test_a_full_disk_stops_the_writer_for_good_and_it_keeps_saying_why(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every write to this device fails as on a full disk; it exists already, which a log refuses elsewhere.
    monkeypatch.setattr("builtins.open", lambda path, mode, **options: io.FileIO("/dev/full", "wb"))
    log = RecordLog("events.jsonl")
    monkeypatch.undo()
    with pytest.raises(RunError, match="cannot write /dev/full: No space left on device") as caught:
        log.write({"a": 1})
    assert "free disk space" in caught.value.fix
    log.close()
    with pytest.raises(RunError, match="cannot write /dev/full: No space left on device"):
        log.write({"a": 1})


def test_an_incomplete_last_line_is_left_out_and_reported(log: EventLog, tmp_path: Path) -> None:
    for version in range(3):
        log.emit("version_retired", version=version)
    content = (tmp_path / "events.jsonl").read_bytes()
    (tmp_path / "events.jsonl").write_bytes(content[:-9])
    reader = read_events(tmp_path)
    assert len(list(reader)) == 2
    assert reader.cut_short
    (tmp_path / "events.jsonl").write_bytes(content)
    assert len(list(reader)) == 3
    assert not reader.cut_short


def test_a_damaged_line_inside_makes_the_log_unusable(log: EventLog, tmp_path: Path) -> None:
    for version in range(3):
        log.emit("version_retired", version=version)
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_bytes(lines[0] + lines[1][:9] + b"\n" + lines[2])
    with pytest.raises(RunError, match="line 2 does not read as a record") as caught:
        list(read_events(tmp_path))
    assert caught.value.origin.endswith("events.jsonl:2")
    assert "put a whole copy of the file in its place" in caught.value.fix


@pytest.mark.parametrize(
    "line",
    [
        b'{"seq":0,"time":1.0,"epoch":0,"kind":"run_began"}',
        b'{"seq":0,"time":1.0,"epoch":0,"kind":"version_retired"}',
        b'{"seq":0,"time":1.0,"epoch":0,"kind":"version_retired","version":"three"}',
    ],
    ids=["unknown kind", "missing field", "wrong type"],
)
def test_the_reader_checks_kinds_fields_and_types(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(line + b"\n")
    with pytest.raises(RunError, match="line 1 does not read"):
        list(read_events(tmp_path))


def test_a_reader_tolerates_fields_added_by_a_later_version(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(
        b'{"seq":0,"time":1.0,"epoch":0,"kind":"version_retired","version":3,"why":"new"}\n'
    )
    assert len(list(read_events(tmp_path))) == 1


def test_an_absent_log_is_refused_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot read") as caught:
        list(read_events(tmp_path / "events.jsonl"))
    assert "run directory" in caught.value.fix


def test_every_kind_has_the_common_keys_besides_its_own() -> None:
    assert len(FIELDS) == 28
    assert not any(fields & {"seq", "time", "epoch", "kind"} for fields in FIELDS.values())


# ---------------------------------------------------------------- a log that is continued

RESUMED = {"version": 0, "checkpoint": "checkpoints/0", "events": 1, "restarted": []}


def test_a_reopened_log_goes_on_counting_in_the_next_epoch(log: EventLog, tmp_path: Path) -> None:
    for expected in (1, 2):
        log.emit("version_retired", version=0)
        log.close()
        log = EventLog.reopen(tmp_path / "events.jsonl")
        log.emit("resumed", **RESUMED)
        assert [e.seq for e in read_events(tmp_path)] == list(range(log.count))
        assert [e.epoch for e in read_events(tmp_path)][-2:] == [expected - 1, expected]
    log.close()


@pytest.mark.parametrize("torn", [b'{"seq":1,"ti', b"\0" * 4096], ids=["half a line", "a page of zeros"])
def test_a_torn_last_line_is_cut_off_before_a_log_goes_on(
    torn: bytes, log: EventLog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log.emit("version_retired", version=0)
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes() + torn)
    with EventLog.reopen(path) as again:
        again.emit("resumed", **RESUMED)
    reader = read_events(path)
    assert [(e.seq, e.epoch) for e in reader] == [(0, 0), (1, 1)]
    assert not reader.cut_short
    assert f"its last {len(torn)} bytes are cut off" in caplog.text


@pytest.mark.parametrize("status", ["stopped", "failed"])
def test_a_run_that_ended_early_can_be_continued(status: str, log: EventLog, tmp_path: Path) -> None:
    log.emit("run_finished", status=status, reason="")
    with EventLog.reopen(tmp_path / "events.jsonl") as again:
        assert again.emit("resumed", **RESUMED)["seq"] == 1


def test_a_completed_run_is_not_continued(log: EventLog, tmp_path: Path) -> None:
    log.emit("run_finished", status="completed", reason="")
    before = (tmp_path / "events.jsonl").read_bytes()
    with pytest.raises(RunError, match="the run is complete: there is nothing to resume"):
        EventLog.reopen(tmp_path / "events.jsonl")
    assert (tmp_path / "events.jsonl").read_bytes() == before


@pytest.mark.parametrize("content", [b"", b'{"seq":0', b'{"seq":0}\n', b"\n"])
def test_a_log_without_an_event_is_not_continued(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(content)
    with pytest.raises(RunError, match="no event to continue after") as caught:
        EventLog.reopen(tmp_path / "events.jsonl")
    assert "fresh directory" in caught.value.fix


def test_an_absent_log_is_not_continued(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot read"):
        EventLog.reopen(tmp_path / "events.jsonl")


def test_records_are_appended_after_the_last_whole_one_and_an_absent_file_is_begun(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(3):
        with RecordLog(path, append=True) as log:
            log.write({"time": 1.5, "phase": "p", "version": 4, "step": step})
        path.write_bytes(path.read_bytes() + b'{"time":')
    assert [record.step for record in read_metrics(path)] == [0, 1, 2]


# ---------------------------------------------------------------- metrics and evaluations


def test_metrics_are_read_with_their_step_and_non_finite_numbers_as_nan(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "metrics.jsonl")
    log.write({"time": 1.5, "phase": "p", "version": 4, "step": 0, "reward/mean": 0.5, "train/loss": math.inf})
    log.close()
    (record,) = read_metrics(tmp_path)
    assert (record.time, record.phase, record.version, record.step) == (1.5, "p", 4, 0)
    assert record.values["reward/mean"] == 0.5
    assert math.isnan(record.values["train/loss"])


def test_evaluations_are_read_with_their_samples(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "evaluation.jsonl")
    log.write({"version": 4, "mode": "greedy", "samples": [{"prompt": "1+1", "answer": "2", "reward": math.nan}]})
    log.close()
    (record,) = read_evaluations(tmp_path)
    assert (record.version, record.mode) == (4, "greedy")
    assert record.samples[0].answer == "2"
    assert record.samples[0].reward is None
