"""A data set of one's own: finite, split without overlap, and taught about its mistakes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.contract import EnvironmentContext
from headrace.errors import ConfigError
from headrace_environments.jsonl import Jsonl, JsonlSettings

Start = Callable[..., Jsonl]


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(map(json.dumps, records)) + "\n")


@pytest.fixture
def start(context: EnvironmentContext, tmp_path: Path) -> Start:
    """Start the environment on ``words.jsonl`` with 100 words, unless settings say otherwise."""
    write(tmp_path / "words.jsonl", [{"prompt": f"w{i}", "answer": f"{i}w", "extra": [i]} for i in range(100)])

    def make(seed: int = 7, **settings: Any) -> Jsonl:
        environment = Jsonl(JsonlSettings(**{"path": "words.jsonl", **settings}))
        environment.start(dataclasses.replace(context, seed=seed))
        return environment

    return make


def prompts(environment: Jsonl, split: Any) -> list[str]:
    size = environment.size(split)
    assert size is not None
    return [environment.task(i, split=split).data["prompt"] for i in range(size)]


def test_every_record_is_one_task_of_one_split(start: Start) -> None:
    environment = start()
    train, held_out = prompts(environment, "train"), prompts(environment, "evaluation")
    assert sorted(train + held_out) == sorted(f"w{i}" for i in range(100))
    assert 2 <= len(held_out) <= 25
    data = environment.task(0, split="evaluation").data
    assert data["answer"] == f"{data['record']['extra'][0]}w"


def test_tasks_are_in_the_order_of_the_file_whatever_the_seed(start: Start) -> None:
    for split in ("train", "evaluation"):
        numbers = [int(prompt[1:]) for prompt in prompts(start(seed=1), split)]
        assert numbers == sorted(numbers)
        assert prompts(start(seed=1), split) == prompts(start(seed=2), split)


def test_adding_records_moves_none_across_the_split(start: Start, tmp_path: Path) -> None:
    before = prompts(start(), "evaluation")
    write(tmp_path / "words.jsonl", [{"prompt": f"w{i}", "answer": f"{i}w"} for i in range(200)])
    assert [p for p in prompts(start(), "evaluation") if int(p[1:]) < 100] == before


def test_templates_build_prompt_and_answer_from_fields(start: Start, tmp_path: Path) -> None:
    write(tmp_path / "sums.jsonl", [{"a": i, "b": {"c": 2}, "sum": i + 2} for i in range(40)])
    environment = start(path="sums.jsonl", prompt="{a}+{b[c]}=", answer="{sum}")
    data = environment.task(3, split="train").data
    assert data["prompt"] == f"{data['record']['a']}+2="
    assert data["answer"] == str(data["record"]["a"] + 2)


def test_a_second_file_is_the_evaluation_split_whole_and_in_order(start: Start, tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", [{"prompt": f"t{i}", "answer": "1"} for i in range(10)])
    environment = start(evaluation_path="test.jsonl")
    assert environment.size("train") == 100
    assert prompts(environment, "evaluation") == [f"t{i}" for i in range(10)]


def test_a_prompt_in_both_files_is_an_error(start: Start, tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", [{"prompt": "w3", "answer": "other"}, {"prompt": "x", "answer": "1"}])
    with pytest.raises(ConfigError, match="1 prompts are in both files, for example 'w3'"):
        start(evaluation_path="test.jsonl")


def test_a_share_of_zero_trains_on_everything(start: Start) -> None:
    environment = start(evaluation_share=0.0)
    assert (environment.size("train"), environment.size("evaluation")) == (100, 0)


def test_an_index_outside_the_file_is_an_error(start: Start) -> None:
    environment = start(evaluation_share=0.0)
    for index in (-1, 100):
        with pytest.raises(IndexError, match=f"task {index} of 100"):
            environment.task(index, split="train")


def test_the_same_problem_has_the_same_id(start: Start, tmp_path: Path) -> None:
    ids = {t.data["prompt"]: t.id for t in (start(seed=1).task(i, split="train") for i in range(50))}
    write(tmp_path / "words.jsonl", [{"prompt": f"w{i}", "answer": f"{i}w"} for i in reversed(range(100))])
    for task in (start(seed=2).task(i, split="train") for i in range(50)):
        assert ids.get(task.data["prompt"], task.id) == task.id


def test_records_without_answers_need_a_reward_of_their_own(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(answer):\n    return len(answer)\n")
    environment = start(answer="", reward="./mine.py:reward")
    with pytest.raises(ConfigError, match="no answer to imitate"):
        environment.demonstration(environment.task(0, split="train"))
    with pytest.raises(ValueError, match='reward = "exact" compares with an answer'):
        JsonlSettings(path="words.jsonl", answer="")


@pytest.mark.parametrize(
    ("content", "settings", "message", "origin"),
    [
        (None, {}, "there is no data file", "[environment] path"),
        ("", {}, "has no records", "data.jsonl"),
        ('{"prompt": "a", "answer": "b"}\n\n{"prompt": ', {}, "not a record: Expecting value", "data.jsonl:3"),
        ('["a"]', {}, r"a record must be a JSON object, this is '\[\"a\"\]'", "data.jsonl:1"),
        ('{"prompt": "a"}', {}, "needs 'answer', which this record lacks; it has prompt", "data.jsonl:1"),
        ('{"q": "a"}', {"prompt": "{question}"}, "needs 'question'", "data.jsonl:1"),
        ('{"prompt": "a", "answer": "é"}', {"evaluation_share": 0.0}, "vocabulary lacks 'é'", "data.jsonl"),
        ('{"prompt": "a", "answer": 99999999999999999999}', {}, "does not fit 64 bits", "data.jsonl:1"),
        ('{"prompt": "a", "answer": "b"}', {}, "1 record leaves none for", "data.jsonl"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(
    start: Start, tmp_path: Path, content: str | None, settings: dict[str, Any], message: str, origin: str
) -> None:
    if content is not None:
        (tmp_path / "data.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        start(path="data.jsonl", **settings)
    assert origin in caught.value.origin
    assert caught.value.fix


def test_a_file_that_is_not_text_is_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ConfigError, match="cannot be read"):
        start(path="data.jsonl")


def test_settings_that_cannot_mean_anything_are_refused() -> None:
    with pytest.raises(ValueError, match="evaluation_share"):
        JsonlSettings(path="x", evaluation_share=1.0)
    with pytest.raises(ValueError, match=r"answer = 'answer' names no field; did you mean \{answer\}"):
        JsonlSettings(path="x", answer="answer")
