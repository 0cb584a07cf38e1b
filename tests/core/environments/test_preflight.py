"""What a start would refuse is refused before it, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.contract import Environment, ModelFacts
from headrace.errors import ConfigError
from headrace_environments.jsonl import Jsonl
from headrace_environments.reasoning_gym import ReasoningGym
from headrace_environments.sort_symbols import SortSymbols
from support.chat_model import write_chat_model

EMPTY = '{"word": "ab", "back": ""}\n'
WORDS = '{"word": "ab", "back": "ba"}\n'


def preflight(cls: type[Environment], directory: Path, **settings: Any) -> None:
    cls.preflight(
        cls.Settings(**settings), directory=str(directory), origin=lambda key: f"job.toml:7  [environment] {key}"
    )


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (SortSymbols, {}),
        (ReasoningGym, {"dataset": "chain_sum"}),
        (Jsonl, {"path": "words.jsonl", "prompt": "{word}", "answer": "{back}", "evaluation_share": 0.0}),
    ],
)
@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("./absent.py:reward", "there is no reward file"),
        ("./mine.py:reword", "has no function 'reword'; it defines: reward. Did you mean 'reward'"),
        ("./broken.py:reward", "cannot be loaded: SyntaxError"),
        ("./leaves.py:reward", "cannot be loaded: SystemExit"),
        ("./words.jsonl:reward", "is not a Python file"),
        ("exakt", "there is no reward 'exakt' here; built in: exact.*Did you mean 'exact'"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused_where_it_is_named(
    tmp_path: Path, cls: type[Environment], settings: dict[str, Any], reward: str, message: str
) -> None:
    (tmp_path / "words.jsonl").write_text(WORDS)
    (tmp_path / "mine.py").write_text("def reward(answer):\n    return 1\n")
    (tmp_path / "broken.py").write_text("def reward(answer) return\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    preflight(cls, tmp_path, **settings, reward="./mine.py:reward")
    with pytest.raises(ConfigError, match=message) as caught:
        preflight(cls, tmp_path, **settings, reward=reward)
    assert caught.value.origin == "job.toml:7  [environment] reward"
    assert caught.value.fix


@pytest.mark.parametrize(
    ("content", "settings", "message", "place"),
    [
        (None, {}, "there is no data file", "] path"),
        ("", {}, "has no records", "] path"),
        ('{"word": "a", "back": "b"}\n{"word"', {}, "not a record", "words.jsonl:2"),
        ("[1]", {}, "a record must be a JSON object", "words.jsonl:1"),
        (WORDS, {"prompt": "{wrd}"}, r"needs 'wrd', which this record lacks; it has word, back", "] prompt, at"),
        (WORDS, {"answer": "{bak}"}, "needs 'bak'", "] answer, at"),
        (WORDS, {"evaluation_path": "words.jsonl"}, "are in both files", "] path and job.toml"),
        (EMPTY * 20, {}, r"every answer in .*words\.jsonl is empty", "] answer"),
        (WORDS, {"evaluation_share": 0.5}, "1 record leaves none for", "] path"),
        (WORDS * 20, {"evaluation_share": 0.5}, "20 records, all with the prompt 'ab', leave none for", "] path"),
        (WORDS, {"prompt": "{word.__class__}>"}, r"asks for \{word\.__class__\}, an attribute", "] prompt, at"),
        (WORDS, {"answer": "{word:{back.real}}"}, r"asks for \{back\.real\}, an attribute", "] answer, at"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_refused(
    tmp_path: Path, content: str | None, settings: dict[str, Any], message: str, place: str
) -> None:
    if content is not None:
        (tmp_path / "words.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        preflight(Jsonl, tmp_path, **{"path": "words.jsonl", "prompt": "{word}", "answer": "{back}", **settings})
    assert place in caught.value.origin
    assert caught.value.fix


def test_some_answers_may_be_empty_and_all_where_there_are_none(tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text(EMPTY + WORDS)
    (tmp_path / "mine.py").write_text("def reward(answer):\n    return 1\n")
    own: dict[str, Any] = {"path": "words.jsonl", "prompt": "{word}", "evaluation_share": 0.0}
    preflight(Jsonl, tmp_path, **own, answer="{back}")
    (tmp_path / "words.jsonl").write_text(EMPTY)
    preflight(Jsonl, tmp_path, **own, answer="", reward="./mine.py:reward")


def test_a_template_that_is_none_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"prompt = '\{word' is not a template"):
        Jsonl.Settings(path="words.jsonl", prompt="{word")


@pytest.mark.parametrize(
    ("settings", "message", "place", "fix"),
    [
        (
            {"dataset": "chain_sums"},
            "no dataset 'chain_sums'; it has .* Did you mean 'chain_sum' or",
            "dataset",
            "chain_sum",
        ),
        ({"config": {"min_term": 9}}, "unexpected keyword argument 'min_term'", "config", "chain_sum has min_terms,"),
        ({"config": {"min_terms": 9}}, "refuses the settings: max_terms must be", "config", "max_terms"),
        ({"prompt": "{metadata[sum]}"}, "needs 'sum', which this record lacks", "prompt", "write {field}"),
    ],
)
def test_a_generated_data_set_that_cannot_be_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str, place: str, fix: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        preflight(ReasoningGym, tmp_path, **{"dataset": "chain_sum", **settings})
    assert caught.value.origin == f"job.toml:7  [environment] {place}"
    assert fix in caught.value.fix


def check_model(cls: type[Environment], directory: Path, model: ModelFacts, **settings: Any) -> None:
    cls.check_model(
        cls.Settings(**settings), model, directory=str(directory), origin=lambda key: f"job.toml:7  [environment] {key}"
    )


@pytest.mark.parametrize(
    ("cls", "settings", "enough"),
    [
        (SortSymbols, {}, "0123456789abcdefghijklmnopqrstuvwxyz="),
        (ReasoningGym, {"dataset": "chain_sum", "prompt": "{metadata[expression]}="}, "0123456789+-= "),
        (Jsonl, {"path": "words.jsonl", "prompt": "{word}", "answer": "{back}", "evaluation_share": 0.0}, "ab"),
    ],
)
def test_a_model_that_cannot_spell_the_tasks_is_refused_where_its_characters_are_listed(
    tmp_path: Path, cls: type[Environment], settings: dict[str, Any], enough: str
) -> None:
    (tmp_path / "words.jsonl").write_text(WORDS)
    origin = "job.toml:3  [model.scratch] alphabet"
    check_model(cls, tmp_path, ModelFacts(origin=origin, characters=frozenset(enough)), **settings)
    check_model(cls, tmp_path, ModelFacts(origin=origin), **settings)
    for lost in enough[0], enough[-1]:
        few = ModelFacts(origin=origin, characters=frozenset(enough) - {lost})
        with pytest.raises(ConfigError, match=f"the vocabulary lacks {lost!r}, needed for") as caught:
            check_model(cls, tmp_path, few, **settings)
        assert caught.value.origin.startswith(origin)
        assert "alphabet of [model.scratch]" in caught.value.fix


def test_a_pretrained_model_is_asked_for_its_tokenizer_and_template(tmp_path: Path) -> None:
    origin, chats = "job.toml:3  [model] path", {"dataset": "chain_sum", "chat": True}
    folder = write_chat_model(tmp_path / "model")
    facts = ModelFacts(origin=origin, path=str(folder))
    check_model(ReasoningGym, tmp_path, facts, **chats)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    with pytest.raises(ConfigError, match="the model has no chat template") as caught:
        check_model(ReasoningGym, tmp_path, facts, **chats)
    assert caught.value.origin.startswith("job.toml:7  [environment] chat")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json") as caught:
        check_model(ReasoningGym, tmp_path, facts, **chats)
    assert caught.value.origin.startswith(origin)


def test_a_model_that_is_made_at_start_cannot_chat(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat template") as caught:
        check_model(ReasoningGym, tmp_path, ModelFacts(origin="x"), dataset="chain_sum", chat=True)
    assert caught.value.origin == "job.toml:7  [environment] chat"
