"""The command: what it prints where, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.cli import main
from headrace.errors import RunError

WriteJob = Callable[..., Path]


@pytest.fixture
def run_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path | None]]:
    """Replace the runner by one that notes the job's name and the run directory."""
    calls: list[tuple[str, Path | None]] = []

    def run_job(job: Any, *, run_dir: Path | None) -> int:
        calls.append((job.job.name, run_dir))
        return 0

    room = types.ModuleType("headrace.run")
    room.run_job = run_job  # type: ignore[attr-defined]  # a stand-in for the room
    monkeypatch.setitem(sys.modules, "headrace.run", room)
    return calls


def test_run_checks_the_job_and_hands_it_to_the_runner(
    write_job: WriteJob, run_calls: list[tuple[str, Path | None]]
) -> None:
    assert main(["run", str(write_job()), "--set", "job.name=other", "--run-dir", "here"]) == 0
    assert main(["run", str(write_job())]) == 0
    assert run_calls == [("other", Path("here")), ("small", None)]


def test_a_job_with_errors_is_not_run_and_all_are_printed(
    write_job: WriteJob, run_calls: list[tuple[str, Path | None]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(write_job(("group_size = 4", "group_size = 1"), ("= 2", "= 3")))]) == 2
    assert run_calls == []
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("ConfigError: ") == 2
    assert printed.err.count("  fix:  ") == 2
    assert "Traceback" not in printed.err


def test_check_says_what_a_sound_job_is(write_job: WriteJob, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_job()
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: no errors. small has 1 phase of 10 batches at most\n"


def test_check_prints_warnings_beside_its_verdict(write_job: WriteJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(write_job()), "--set", "evaluation.prompts=3"]) == 0
    assert capsys.readouterr().err.startswith("Warning: prompts is ignored: evaluation.every is 0\n  from: --set")


def test_a_missing_job_file_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "no/such.toml"]) == 2
    assert capsys.readouterr().err.splitlines()[0] == (
        "ConfigError: cannot read the job file: No such file or directory"
    )


def test_graph_shows_processes_edges_columns_and_phases(
    write_job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["rollout.instances=2", "algorithm.reference_weight=0.1"]
    overrides = [word for change in changes for word in ("--set", change)]
    assert main(["graph", str(write_job()), *overrides]) == 0
    text = capsys.readouterr().out
    assert "small: 7 processes" in text
    assert "  2 x rollout" in text
    assert "tokens, loss_mask, behaviour_logprobs, group, version, truncated, reward" in text
    assert "main: 10 batches\n" in text
    assert "8 groups x 4 trajectories, 2 mini-batches, 8192 tokens per micro-batch" in text
    assert "at most 1 versions old" in text
    assert "also computes reference log-probs" in text


def test_graph_shows_a_phase_of_demonstrations_and_its_end(
    write_job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    until = '\n[evaluation]\nevery = 1\n[[phase]]\nname = "warm-up"\nsteps = 5\n'
    until += 'until = { metric = "evaluation/greedy_accuracy", at_least = 0.5 }\n'
    assert main(["graph", str(write_job((":Relative", ":Imitation"), ("steps = 10\n", ""), extra=until))]) == 0
    text = capsys.readouterr().out
    assert "warm-up: 5 batches, or until evaluation/greedy_accuracy >= 0.5" in text
    assert "on the environment's demonstrations" in text
    assert "staleness" not in text


def test_plugins_lists_one_role_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "storage"]) == 0
    assert capsys.readouterr().out.split()[:3] == ["storage", "disk", "headrace_storage.disk:DiskStorage"]
    assert main(["plugins"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} >= {"algorithm", "observer", "staleness"}


def test_an_unknown_role_is_refused_with_the_near_miss(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "algoritm"]) == 2
    assert "Did you mean 'algorithm'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["audit"], ["run"]], ids=["headrace", "audit", "run"])
def test_help_tells_the_exit_statuses(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "0 done; 1 a run or an audit failed, or an engine does not work; 2 " in told
    assert "3 an audit found nothing wrong, in the log of a run that has not ended; 130 interrupted" in told


@pytest.mark.parametrize(
    ("ok", "finished", "code"), [(True, True, 0), (True, False, 3), (False, True, 1), (False, False, 1)]
)
def test_audit_prints_its_result_and_fails_when_it_does(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    ok: bool,
    finished: bool,
    code: int,
) -> None:
    class Result:
        def __init__(self, path: Path) -> None:
            self.ok, self.finished = ok, finished
            self.path = path

        def __str__(self) -> str:
            return f"audit of {self.path}"

    monkeypatch.setattr("headrace.observe.audit.audit_run", Result)
    assert main(["audit", str(tmp_path)]) == code
    assert capsys.readouterr().out == f"audit of {tmp_path}\n"


def test_an_error_of_a_run_exits_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(path: Path) -> None:
        raise RunError("no event log", origin=str(path))

    monkeypatch.setattr("headrace.observe.audit.audit_run", fail)
    assert main(["audit", "gone"]) == 1
    assert capsys.readouterr().err == "RunError: no event log\n  from: gone\n"


def test_an_interrupt_exits_with_130_and_says_what_it_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.observe.audit.audit_run", interrupt)
    assert main(["audit", "x"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    monkeypatch.setattr("headrace.config.load_job", interrupt)
    assert main(["run", "x"]) == 130
    assert capsys.readouterr().err == "interrupted before the run began: nothing was started\n"


def test_checking_a_job_brings_no_engine_along() -> None:
    job = Path(__file__).parents[3] / "examples" / "sort_symbols" / "job.toml"
    code = f"import sys\nfrom headrace.cli import main\nmain(['check', {str(job)!r}])\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "no errors" in done.stdout
    assert done.stdout.endswith("False\n")


def test_the_command_is_installed_and_tells_its_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"headrace {headrace.__version__}\n"


def test_help_needs_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys\nfrom headrace.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted(name for name in sys.modules if name in ('pydantic', 'zmq', 'numpy', 'rich')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
