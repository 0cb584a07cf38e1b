"""Generated problems: pure in (seed, split, index), splits without a shared prompt, the family's own verdict."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.contract import Completion, EnvironmentContext, Episode, FinishReason, Task
from headrace.errors import ConfigError
from headrace_environments.plain import from_plain, to_plain
from headrace_environments.reasoning_gym import ReasoningGym, ReasoningGymSettings

Start = Callable[..., ReasoningGym]
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture
def start(context: EnvironmentContext, character_model: Callable[[str], Path]) -> Start:
    """Start the environment over a vocabulary of all printable characters."""
    printable = "".join(map(chr, range(32, 127))) + "\u00d7\n"
    model = str(character_model(printable))

    def make(dataset: str = "chain_sum", seed: int = 7, **settings: Any) -> ReasoningGym:
        environment = ReasoningGym(ReasoningGymSettings(dataset=dataset, **settings))
        environment.start(dataclasses.replace(context, seed=seed, model_path=model))
        return environment

    return make


def episode(text: str, finish_reason: FinishReason = "stop") -> Episode:
    completion = Completion(token_ids=np.array([9]), logprobs=np.array([-1.0]), spans=(), finish_reason=finish_reason)
    return Episode.single_turn(np.array([1]), completion, text=text)


def travelled(task: Task) -> Task:
    """As it arrives in a scoring process."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(task), type=Task)


def test_the_prompt_is_a_template_over_the_items_fields(start: Start) -> None:
    environment = start(prompt="{metadata[expression]}=", config=SUMS)
    data = environment.task(0, split="train").data
    assert eval(data["prompt"].rstrip("=")) == int(data["answer"])
    assert "State" in start(config=SUMS).task(0, split="train").data["prompt"]


def test_a_task_depends_on_seed_split_and_index_alone(start: Start) -> None:
    one, again, other = start(), start(), start(seed=8)
    indices = [0, 1, 600, 5, 100_000]
    tasks = [one.task(i, split="train") for i in indices]
    assert [again.task(i, split="train") for i in reversed(indices)] == tasks[::-1]
    assert [other.task(i, split="train") for i in indices] != tasks
    assert len({t.id for t in tasks}) == len(tasks)


def test_the_splits_share_no_prompt_even_where_there_are_few(start: Start) -> None:
    environment, prompt = start(prompt="{metadata[expression]}=", config=SUMS), {}
    for split in ("train", "evaluation"):
        prompt[split] = {environment.task(i, split=split).data["prompt"] for i in range(600)}
    other = start(seed=8, prompt="{metadata[expression]}=", config=SUMS)
    prompt["train"] |= {other.task(i, split="train").data["prompt"] for i in range(600)}
    assert not prompt["train"] & prompt["evaluation"]
    assert min(map(len, prompt.values())) > 5


def test_a_family_with_too_few_prompts_for_two_splits_is_refused_at_start(start: Start) -> None:
    with pytest.raises(ConfigError, match="none of 512 generated prompts belongs to split") as caught:
        start(prompt="{metadata[num_terms]}", config=SUMS)
    assert "too few distinct prompts" in caught.value.fix


def test_the_familys_verifier_judges_the_answer(start: Start) -> None:
    environment = start(config=SUMS)
    task = travelled(environment.task(3, split="train"))
    right = task.data["answer"]
    assert environment.score(task, episode(right)).reward == 1
    assert environment.score(task, episode("no")).reward == 0
    assert environment.score(task, episode(right, "length")).reward == 0
    assert environment.score(task, environment.demonstration(task)).reward == 1


def test_a_little_reward_for_a_wrong_answer_is_kept_and_is_not_correct(start: Start) -> None:
    environment = start("fraction_simplification")
    task = travelled(environment.task(0, split="train"))
    score = environment.score(task, episode("x"))
    assert 0 < score.reward < 1
    assert score.correct is None


def test_a_verifier_that_raises_on_a_malformed_answer_gives_nothing_and_counts_it(start: Start) -> None:
    environment = start("prime_factorization")
    task = travelled(environment.task(0, split="train"))
    malformed = environment.score(task, episode("abc"))
    assert (malformed.reward, malformed.components) == (0.0, {"malformed": 1.0})
    right = environment.score(task, episode(task.data["answer"]))
    assert (right.reward, right.components) == (1.0, {"malformed": 0.0})


def test_a_verifier_that_is_broken_itself_raises(start: Start) -> None:
    environment = start()
    task = Task(id="x", data={"prompt": "", "answer": "1", "record": {"answer": "1"}})
    broken = dataclasses.replace(task, data={**task.data, "record": {}})
    with pytest.raises(KeyError, match="answer"):
        environment.score(broken, episode("1"))


def test_verifiers_get_the_item_as_it_was_generated(start: Start) -> None:
    environment = start("rearc")
    task = travelled(environment.task(0, split="train"))
    assert environment.score(task, episode(task.data["answer"])).reward == 1


def test_a_reward_file_sees_the_item(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(record):\n    return record['metadata']['num_terms']\n")
    environment = start(config=SUMS, reward="./mine.py:reward")
    assert environment.score(travelled(environment.task(0, split="train")), episode("")).reward == 2


def test_plain_values_come_back_as_they_were() -> None:
    value = {"a": (1, [2, (3,)]), "b": {1: "x", ("k",): None}, "c": {3, 4}, "d": 10**30, "$": True, "e": 1.5}
    assert from_plain(json.loads(json.dumps(to_plain(value)))) == value
    assert to_plain(np.float32(0.5)) == 0.5
    assert to_plain(1 + 2j) == "(1+2j)"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "chain_sums"}, "has no dataset 'chain_sums'"),
        ({"config": {"min_terms": 9}}, "refuses the settings: max_terms must be"),
        ({"config": {"terms": 9}}, "refuses the settings: .*unexpected keyword argument 'terms'"),
        ({"prompt": "{metadata[sum]}"}, "needs 'sum', which this record lacks; it has question, answer, metadata"),
        ({"reward": "verifire"}, "there is no reward 'verifire' here; built in: exact, verifier"),
    ],
)
def test_a_wrong_setting_is_refused_at_start(start: Start, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        start(**settings)
    assert caught.value.origin


def test_seed_and_size_belong_to_the_job() -> None:
    with pytest.raises(ValueError, match="config must not set seed or size"):
        ReasoningGymSettings(dataset="chain_sum", config={"seed": 1, "size": 3})


def test_tasks_that_follow_the_hash_seed_are_refused_unless_it_is_fixed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="depend on Python's hash seed") as caught:
        start("isomorphic_strings")
    assert "PYTHONHASHSEED=0" in caught.value.fix
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert start("isomorphic_strings").task(0, split="train").data["prompt"]


def test_a_character_outside_the_vocabulary_is_named_at_start(context: EnvironmentContext) -> None:
    environment = ReasoningGym(ReasoningGymSettings(dataset="chain_sum"))
    with pytest.raises(ConfigError, match=r"vocabulary lacks .*'S'"):
        environment.start(context)
