"""Prompts, answers, sequences and the memory for them: what can never fit is refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.refusals import refused, teaches
from support.small_job import JOB, REWARD

WriteTiny = Callable[..., Path]


@pytest.fixture
def write_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteTiny:
    """A small job that runs, with replacements: sequences of 64 tokens, prompts of 7 at most, answers of 8."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)

    def write(*replacements: tuple[str, str]) -> Path:
        text = JOB
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "job.toml").write_text(text)
        return tmp_path / "job.toml"

    return write


@pytest.mark.parametrize("kv_tokens", [3, 16, 63])
def test_memory_for_less_than_one_sequence_is_refused(
    write_tiny: WriteTiny, capsys: pytest.CaptureFixture[str], kv_tokens: int
) -> None:
    text = refused(write_tiny(), capsys, "--set", f"rollout.kv_tokens={kv_tokens}")
    teaches(text, f"--set rollout.kv_tokens={kv_tokens}", "prompt and answer may have 64 tokens", "at least 64")


def test_memory_for_one_sequence_is_enough(write_tiny: WriteTiny) -> None:
    from headrace.config import check_job, load_job

    assert check_job(load_job(write_tiny(), ["rollout.kv_tokens=64"])) == []
