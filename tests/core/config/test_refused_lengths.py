"""Prompts, answers, sequences and the memory for them: what can never fit is refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.config import check_job, load_job
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
    assert check_job(load_job(write_tiny(), ["rollout.kv_tokens=64"])) == []


SYMBOLS = 'use = "sort_symbols"\nmedian = 3\nshortest = 2\nlongest = 6\nreward = "./reward.py:digits"'
JSONL = 'use = "jsonl"\npath = "words.jsonl"\nprompt = "{word}="\nanswer = "{back}"\n'


def write_words(folder: Path, *words: str) -> None:
    (folder / "words.jsonl").write_text("".join(f'{{"word": "{word}", "back": "{word[::-1]}"}}\n' for word in words))


FEW = [f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"]


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_with_its_beginning(
    write_tiny: WriteTiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_words(tmp_path, *FEW, "x" * 62)
    text = refused(write_tiny((SYMBOLS, JSONL)), capsys)
    teaches(text, "[environment]", "a prompt of 64 tokens leaves no room for an answer", "64 tokens or more")
    assert f"the longest prompt is '{'x' * 59}…'" in text


def test_a_prompt_that_leaves_room_for_one_token_is_accepted(write_tiny: WriteTiny, tmp_path: Path) -> None:
    write_words(tmp_path, *FEW, "x" * 61)
    assert [str(finding) for finding in check_job(load_job(write_tiny((SYMBOLS, JSONL))))] == []


@pytest.mark.parametrize(("longest", "refusals"), [(61, 0), (62, 1)])
def test_prompts_of_symbols_are_as_long_as_the_settings_let_them_be(
    write_tiny: WriteTiny, longest: int, refusals: int
) -> None:
    job = load_job(write_tiny(("longest = 6", f"longest = {longest}\ndistinct = false")))
    found = [str(finding) for finding in check_job(job)]
    assert [f"a prompt of {longest + 2} tokens" in text for text in found] == [True] * refusals


def test_a_reward_for_exact_answers_that_none_can_have_is_refused(
    write_tiny: WriteTiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_words(tmp_path, *(f"{word}{'x' * 6}" for word in FEW))
    text = refused(write_tiny((SYMBOLS, JSONL)), capsys)
    teaches(text, "[rollout] max_new_tokens = 8", "the shortest has 9 tokens, its end included", "at least 9")
    assert "no other is rewarded" in text


def test_answers_too_short_for_the_tasks_own_are_warned_about_where_others_are_rewarded(write_tiny: WriteTiny) -> None:
    (finding,) = check_job(load_job(write_tiny(), ["rollout.max_new_tokens=2"]))
    assert finding.severity == "warning"
    assert "max_new_tokens = 2 is too few for any of the tasks' own answers: the shortest has 3" in str(finding)
    assert "from: --set rollout.max_new_tokens=2" in str(finding)


def test_one_answer_that_fits_is_enough(write_tiny: WriteTiny, tmp_path: Path) -> None:
    write_words(tmp_path, *(f"{word}{'x' * 6}" for word in FEW), "short")
    assert check_job(load_job(write_tiny((SYMBOLS, JSONL)))) == []
    assert check_job(load_job(write_tiny(), ["rollout.max_new_tokens=3"])) == []
