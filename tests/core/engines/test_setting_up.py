"""An environment is made where nothing was, of what the engine's plugin says, and removed when it is not finished."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from headrace import cli
from headrace.contract import Setup
from headrace.engines.setting_up import installing
from headrace.errors import PluginError
from headrace.registry import Listed, listing, load

STRANGER = '''"""A stranger's engine."""

from headrace.contract import Setup
from headrace.testing import FakeInferenceEngine


class Stranger(FakeInferenceEngine):
    @classmethod
    def setup(cls):
        return Setup(requirements=("some-engine>=3",), python="==3.5.*", note="wheels are on the author's page")


class Silent(FakeInferenceEngine):
    """Says nothing of what it needs."""
'''
POINTS = "[headrace.inference_engine]\nstranger = stranger:Stranger\nsilent = stranger:Silent\n"


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution that was installed from this folder."""
    site = tmp_path / "site"
    info = site / "stranger-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    told = {"url": tmp_path.as_uri(), "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(told))
    (site / "stranger.py").write_text(STRANGER)
    monkeypatch.syspath_prepend(site)
    return tmp_path


def engine(name: str) -> Listed:
    return next(each for each in listing("inference_engine") if each.name == name)


def created(*arguments: str) -> int:
    return cli.main(["env", "create", *arguments])


def test_a_directory_that_is_there_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("keep me")
    assert created("vllm", "--dir", str(tmp_path / "mine")) == 2
    assert "is there already, and nothing in it was changed" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "keep me"


def test_an_environment_that_cannot_be_finished_is_removed_and_the_cause_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, lock = tmp_path / "vllm", tmp_path / "no.txt"
    assert created("vllm", "--dir", str(home), "--lock", str(lock)) == 1
    told = capsys.readouterr()
    assert f"$ {sys.executable} -m venv {home}\n" in told.out
    assert f"$ {home}/bin/python -m pip install --no-deps -r {lock}\n" in told.out
    assert f"removed {home}, which is not finished" in told.out
    assert f"Could not open requirements file: [Errno 2] No such file or directory: '{lock}'" in told.err
    assert not home.exists()


def test_an_engine_whose_distributions_ask_for_another_python_than_it_was_tested_with_is_installed_anyhow() -> None:
    listed = next(each for each in listing("training_engine") if each.name == "megatron")
    by_lock, own = installing("python", listed, load("training_engine", "megatron").setup())
    assert by_lock[:6] == ["python", "-m", "pip", "install", "--ignore-requires-python", "--no-deps"]
    assert by_lock[-1].endswith("megatron-core-0.19.2.txt")
    assert "--ignore-requires-python" not in own


def test_a_python_that_an_engine_was_not_tested_with_is_refused_with_both_versions(
    stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert created("stranger", "--dir", str(stranger / "env")) == 2
    told = capsys.readouterr().err
    assert "stranger is set up with Python ==3.5.*, and " in told
    assert f"is Python {sys.version_info[0]}.{sys.version_info[1]}" in told
    assert "--python python3.11" in told
    assert not (stranger / "env").exists()


@pytest.mark.parametrize("python", ["no-such-python", "/bin/false"])
def test_what_is_no_python_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], python: str) -> None:
    assert created("vllm", "--dir", str(tmp_path / "env"), "--python", python) == 2
    assert f"interpreter {python} is " in capsys.readouterr().err
    assert not (tmp_path / "env").exists()


def test_an_engine_that_is_not_there_is_told_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert created("vlm") == 2
    told = capsys.readouterr().err
    assert "no engine named 'vlm'; installed: " in told
    assert "Did you mean 'vllm'?" in told


def test_an_engine_that_says_nothing_of_its_interpreter_cannot_be_set_up(
    stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert created("silent", "--dir", str(stranger / "env")) == 2
    assert "inference_engine 'silent' does not say what its interpreter must have" in capsys.readouterr().err
    assert not (stranger / "env").exists()


def test_a_lock_is_all_there_is_beside_headrace_and_the_plugin_as_they_are_here(stranger: Path) -> None:
    lock, own = installing("python", engine("stranger"), Setup(lock="lock.txt"))
    assert lock == ["python", "-m", "pip", "install", "--no-deps", "-r", "lock.txt"]
    assert own[:5] == ["python", "-m", "pip", "install", "--no-deps"]
    assert own[-2:] == ["-e", str(stranger)]


def test_requirements_are_installed_with_what_they_need(stranger: Path) -> None:
    (command,) = installing("python", engine("stranger"), Setup(requirements=("some-engine>=3",)))
    assert "--no-deps" not in command
    assert command[4] == "some-engine>=3"
    assert command[-2:] == ["-e", str(stranger)]


def test_an_engine_of_an_extra_is_set_up_by_that_extra() -> None:
    (command,) = installing("python", engine("torch"), None)
    assert command[:4] == ["python", "-m", "pip", "install"]
    assert command[-1].endswith("[torch]") or command[-1].startswith("headrace[torch]==")


def test_an_engine_without_an_extra_has_nothing_to_install(stranger: Path) -> None:
    with pytest.raises(PluginError, match=r"its author can say it in Plugin\.setup"):
        installing("python", engine("silent"), None)


@pytest.mark.parametrize("named", [{}, {"lock": "lock.txt", "requirements": ("some-engine",)}])
def test_a_setup_has_either_a_lock_or_requirements(named: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="either a lock or requirements"):
        Setup(**named)  # type: ignore[arg-type]  # as a plugin's author may write it
