"""Cases K02, K04, K05 and K08: a run goes on where it was, from a checkpoint that is whole and is its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.contract import EnvironmentContext
from headrace.errors import RunError
from headrace.observe.audit import audit_run
from headrace.observe.epochs import standing_events
from headrace.observe.events import BatchTrained, CheckpointSaved, PhaseStarted, read_events
from headrace.run.checkpoint import FORMAT, complete, newest, staging
from headrace.run.tasks import TasksIdentity, identify, require_same
from headrace.testing import FakeEnvironment
from headrace_environments.jsonl import Jsonl, JsonlSettings
from support import killed_saves
from support.killed_saves import save
from support.small_job import Run

# ---------------------------------------------------------------- K05, K08


@pytest.mark.parametrize("second", [6, 5], ids=["the next version", "the same version, after a skipped batch"])
def test_K05_killed_at_any_instant_of_a_save_a_run_resumes_from_this_step_or_the_one_before(
    tmp_path: Path, second: int
) -> None:
    command = [sys.executable, "-m", killed_saves.__name__, str(tmp_path), "5", str(second)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(killed_saves.__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr
    states = json.loads(done.stdout)
    assert len(states) >= 20
    assert states == sorted(states), "once it can be resumed from, it can be resumed from"
    assert states[0] == [5, 17]
    assert states[-1] == [second, 18]
    assert all(state in ([5, 17], [second, 18]) for state in states)


def test_K08_a_checkpoint_of_another_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 5)
    told = json.loads((path / "state.json").read_text()) | {"format": FORMAT + 1, "step": "words of a later version"}
    hidden = staging(path)
    shutil.copytree(path / "trainer", hidden / "trainer")
    complete(hidden, path, told, [])  # type: ignore[arg-type]  # what a later version calls a state
    with pytest.raises(RunError, match=f"format {FORMAT + 1}, expected {FORMAT}") as refused:
        newest(path.parent, in_force=[path.name])
    assert "version of Headrace that wrote it" in refused.value.fix


# ---------------------------------------------------------------- K04


@pytest.fixture
def identified(tmp_path: Path) -> Any:
    """The identity of a data set of so many records, where some read otherwise."""

    def make(records: int, **otherwise: str) -> TasksIdentity:
        lines = [{"prompt": f"{n}=", "answer": otherwise.get(f"r{n}", "1")} for n in range(records)]
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
        environment = Jsonl(JsonlSettings(path="data.jsonl", evaluation_share=0.0))
        environment.read(str(tmp_path), lambda key: key)
        return identify(environment)

    return make


def test_K04_another_data_set_is_refused_with_what_changed(identified: Any) -> None:
    began = identified(100)
    require_same(began, identified(100))
    with pytest.raises(RunError, match="train had 100 tasks and has 20") as refused:
        require_same(began, identified(20))
    assert "put the data back" in refused.value.fix
    with pytest.raises(RunError, match="as many as before, and some of them differ"):
        require_same(began, identified(100, r41="2"))


def test_K04_an_endless_stream_is_known_by_its_first_tasks() -> None:
    def stream(seed: int, **settings: Any) -> TasksIdentity:
        environment = FakeEnvironment(FakeEnvironment.Settings(**settings))
        environment.start(EnvironmentContext(model_path="", seed=seed, directory=""))
        return identify(environment)

    require_same(stream(0), stream(0))
    for other in (stream(1), stream(0, length=3)):
        with pytest.raises(RunError, match="some of them differ"):
            require_same(stream(0), other)
    with pytest.raises(RunError, match="train had an endless stream and has 7 tasks"):
        require_same(stream(0), stream(0, size=7))


def test_K04_the_identity_survives_a_checkpoint(identified: Any, tmp_path: Path) -> None:
    found = msgspec.json.decode(msgspec.json.encode(began := identified(30)), type=TasksIdentity)
    require_same(began, found)


# ---------------------------------------------------------------- K02

JOB = """
[job]
name = "edges"

[model.scratch]
vocabulary = 8

[environment]
use = "headrace.testing:FakeEnvironment"
vocabulary = 8
size = 100

[rollout]
use = "headrace.testing:FakeInferenceEngine"
max_new_tokens = 4

[trainer]
use = "headrace.testing:FakeTrainingEngine"
learning_rate = 1.0

[algorithm]
use = "headrace.testing:FakeAlgorithm"

[batch]
groups = 2
group_size = 2

[staleness]
policy = "synchronous"

[checkpoint]
keep = 9

[[phase]]
name = "one"
steps = 3

[[phase]]
name = "two"
steps = 2
"""


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edges")
    (folder / "job.toml").write_text(JOB)
    run = Run(folder / "run", str(folder / "job.toml"), "--run-dir", str(folder / "run"))
    assert run.wait() == 0, run.stderr
    return run.directory


def killed_after(complete_run: Path, directory: Path, version: int) -> int:
    """A copy of the run whose log ends with the checkpoint of ``version``; the number of its events."""
    shutil.copytree(complete_run, directory)
    saved = [e for e in read_events(directory) if isinstance(e, CheckpointSaved)]
    assert [event.version for event in saved] == [3, 5], "the end of a phase is always kept"
    (last,) = (event.seq for event in saved if event.version == version)
    lines = (directory / "events.jsonl").read_bytes().splitlines(keepends=True)
    (directory / "events.jsonl").write_bytes(b"".join(lines[: last + 1]))
    return last + 1


@pytest.mark.parametrize("version", [3, 5], ids=["between two phases", "after the last one"])
def test_K02_killed_at_the_edge_of_a_phase_a_run_does_what_is_left_and_no_more(
    complete_run: Path, version: int, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    before = killed_after(complete_run, directory, version)
    resumed = Run(directory, "--resume", str(directory))
    assert resumed.wait() == 0, resumed.stderr
    events = list(standing_events(directory))
    trained = [event.version for event in events if isinstance(event, BatchTrained)]
    assert trained == [0, 1, 2, 3, 4]
    assert [event.phase for event in events if isinstance(event, PhaseStarted)] == ["one", "two"]
    assert sum(isinstance(event, BatchTrained) for event in list(read_events(directory))[before:]) == 5 - version
    assert (directory / "model" / "final").is_dir()
    assert audit_run(directory).ok


def test_K05_killed_before_the_log_names_a_checkpoint_a_run_goes_on_from_the_one_of_the_same_version_before_it(
    complete_run: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    killed_after(complete_run, directory, 3)
    announced, later = sorted((directory / "checkpoints").iterdir())
    shutil.rmtree(later)
    unannounced = shutil.copytree(announced, announced.with_name("version-00000003-event-99999999"))
    resumed = Run(directory, "--resume", str(directory))
    assert resumed.wait() == 0, resumed.stderr
    assert audit_run(directory).ok
    assert announced.is_dir()
    assert not unannounced.exists()


def test_K04_a_run_is_not_resumed_on_other_data(complete_run: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    before = killed_after(complete_run, directory, 3)
    job = (directory / "job.json").read_text()
    assert '"size": 100' in job
    (directory / "job.json").write_text(job.replace('"size": 100', '"size": 20'))
    resumed = Run(directory, "--resume", str(directory))
    assert resumed.wait() == 1
    assert "train had 100 tasks and has 20 tasks" in resumed.stderr
    assert "put the data back" in resumed.stderr
    assert "Traceback" not in resumed.stderr
    assert not any(isinstance(event, BatchTrained) for event in list(read_events(directory))[before:])


def test_a_log_that_is_cut_in_the_middle_of_a_line_is_said_to_be_and_the_run_resumed_before_it(
    complete_run: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    before = killed_after(complete_run, directory, 3)
    with open(directory / "events.jsonl", "ab") as log:
        log.write(b'{"seq":%d,"time":17' % before)
    audit = audit_run(directory)
    assert audit.ok
    assert audit.summary["cut_short"]
    assert "so far" in audit.verdict
    resumed = Run(directory, "--resume", str(directory))
    assert resumed.wait() == 0, resumed.stderr
    assert "ends in the middle of a line" in resumed.stderr
    assert [event.version for event in standing_events(directory) if isinstance(event, BatchTrained)] == [0, 1, 2, 3, 4]
    assert audit_run(directory).ok
