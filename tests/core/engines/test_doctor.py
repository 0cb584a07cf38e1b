"""Engines are tried where they live, and what is missing or wrong is said with what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace import cli
from headrace.engines import doctor
from headrace.registry import listing

JOB = """
[job]
name = "fakes"

[model.scratch]
vocabulary = 8

[environment]
use = "headrace.testing:FakeEnvironment"
vocabulary = 8

[rollout]
use = "headrace.testing:FakeInferenceEngine"
max_new_tokens = 8

[trainer]
use = "headrace.testing:FakeTrainingEngine"

[algorithm]
use = "headrace.testing:FakeAlgorithm"

[batch]
groups = 8
group_size = 4

[[phase]]
name = "only"
steps = 20
"""

ENGINES = '''"""Engines that are ill."""

import os

from headrace.errors import EngineError
from headrace.testing import FakeInferenceEngine, FakeTrainingEngine


class Crashing(FakeInferenceEngine):
    async def start(self, context):
        os.write(2, b"Illegal instruction\\\\n")
        os._exit(7)


class Stuck(FakeInferenceEngine):
    """Its first request is never answered."""

    def _step(self):
        pass


class Forgetful(FakeInferenceEngine):
    """Takes weights up and goes on under the ones before."""

    async def submit(self, requests):
        await super().submit([type(r)(**{**{f: getattr(r, f) for f in r.__slots__}, "version": 0}) for r in requests])


class Refusing(FakeTrainingEngine):
    def start(self, context):
        raise EngineError("there is no GPU", fix="look for one")


class Bug(FakeTrainingEngine):
    def start(self, context):
        return {}["weights"]
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "engines.py").write_text(ENGINES)
    return tmp_path


def examined(folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and role → what is said of its engine."""
    sets = [word for override in overrides for word in ("--set", override)]
    code = cli.main(["doctor", str(folder / "job.toml"), "--json", *sets])
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (code == 0)
    return code, {each["role"]: each for each in told["engines"]}


def test_the_engines_of_a_job_are_started_and_used_where_they_live(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = examined(folder, capsys)
    assert code == 0
    assert {each["status"] for each in found.values()} == {"works"}
    rollout, trainer = found["inference_engine"], found["training_engine"]
    assert rollout["found"]["told"] == "8 tokens, the same under versions 0 and 1"
    assert rollout["found"]["capabilities"]["live_versions"] == 4
    assert rollout["interpreter"] == sys.executable
    assert rollout["found"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert trainer["found"]["told"].startswith("log-probs of 7 tokens, a step with loss")
    assert trainer["phases"] == ["only"]


@pytest.mark.parametrize(
    ("override", "message", "origin"),
    [
        ("rollout.use='./engines.py:Crashing'", "the smoke test ended with status 7", "Illegal instruction"),
        ("rollout.use='./engines.py:Forgetful'", "version 1 was asked for, and [0] sampled the tokens", ""),
        ("rollout.fail_after=2", "a decode step failed", ""),
        ("trainer.use='./engines.py:Refusing'", "there is no GPU", ""),
        ("trainer.use='./engines.py:Bug'", "KeyError: 'weights'", "engines.py:"),
    ],
)
def test_an_engine_that_fails_is_told_of_in_its_own_words(
    folder: Path, capsys: pytest.CaptureFixture[str], override: str, message: str, origin: str
) -> None:
    code, found = examined(folder, capsys, override)
    (failed,) = (each for each in found.values() if each["status"] != "works")
    assert code == 1
    assert failed["status"] == "fails"
    assert message in failed["error"]["message"]
    assert origin in failed["error"]["origin"]
    assert failed["error"]["fix"]
    assert failed["found"]["contract"] == 1, "what was found before it failed is kept"


def test_an_engine_that_stands_still_is_killed_after_its_deadline(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "DEADLINE", 3.0)
    _, found = examined(folder, capsys, "rollout.use='./engines.py:Stuck'")
    assert "did not end in 3 s" in found["inference_engine"]["error"]["message"]


def test_a_missing_interpreter_is_told_with_the_command_that_makes_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = examined(folder, capsys, "rollout.use=vllm", "rollout.python=./envs/mine/bin/python")
    assert code == 1
    missing = found["inference_engine"]
    assert missing["status"] == "missing"
    assert missing["commands"] == [f"headrace env create vllm --dir {folder}/envs/mine"]


def test_a_command_that_is_no_interpreter_is_told_with_where_one_would_be_made(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    _, found = examined(folder, capsys, "rollout.use=vllm", "rollout.python=python9")
    assert found["inference_engine"]["commands"] == [
        "headrace env create vllm",
        f"headrace run JOB --set rollout.python={folder}/venvs/vllm/bin/python",
    ]


def test_an_interpreter_that_lacks_the_engine_is_told_with_what_to_install_into_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = folder / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'headrace'\" >&2\nexit 1\n")
    python.chmod(0o755)
    _, found = examined(folder, capsys, "rollout.use=vllm", f"rollout.python={python}")
    lock, own = found["inference_engine"]["commands"]
    assert lock.startswith(f"{python} -m pip install --no-deps -r ")
    assert Path(lock.split()[-1]).is_file()
    assert own.startswith(f"{python} -m pip install --no-deps ")


def test_an_environment_that_was_made_for_an_engine_and_does_not_work_is_a_failure(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(doctor, "engines", lambda: [each for each in listing() if each.name == "vllm"])
    python = folder / "venvs" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)  # not the environment that this one belongs to
    assert cli.main(["doctor"]) == 1
    assert f"interpreter {python} cannot use headrace: " in capsys.readouterr().out


def test_overrides_need_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--set", "rollout.use=vllm"]) == 2
    assert "which job? --set overrides the keys of one" in capsys.readouterr().err
