"""Cases about tasks, answers and scores, with text environments and real scoring processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from tokenizers import Tokenizer, decoders, models

from headrace.contract import (
    Array,
    Batch,
    Completion,
    EnvironmentContext,
    Episode,
    FinishReason,
    Ragged,
    Score,
    Split,
    VersionSpan,
)
from headrace.errors import ContractError, RunError
from headrace.registry import PluginSpec
from headrace.services.failures import FailureShare
from headrace.services.scoring import ScoringFailure, ScoringPool
from headrace_environments.jsonl import Jsonl, JsonlSettings
from headrace_environments.reasoning_gym import ReasoningGym, ReasoningGymSettings
from headrace_environments.sort_symbols import SYMBOLS, SortSymbols, SortSymbolsSettings
from headrace_environments.text import TextEnvironment

Start = Callable[..., TextEnvironment]


def completion(tokens: list[int], *, logprobs: int | None = None, finish: FinishReason = "stop") -> Completion:
    count = len(tokens)
    return Completion(
        token_ids=np.array(tokens, dtype=np.int32),
        logprobs=-np.ones(count if logprobs is None else logprobs, dtype=np.float32),
        spans=(VersionSpan(version=1, start=0, stop=count),) if count else (),
        finish_reason=finish,
    )


class Answers:
    """A session that gives one completion, or raises."""

    def __init__(self, answer: Completion | Exception) -> None:
        self.answer = answer

    async def generate(self, prompt: Array, **limits: Any) -> Completion:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def context(tmp_path: Path) -> EnvironmentContext:
    """A model whose characters have ids from 5 on, besides he = 1, llo = 2, hello = 3 and end 4."""
    vocabulary = {"<pad>": 0, "he": 1, "llo": 2, "hello": 3, "<eos>": 4}
    vocabulary |= {c: 5 + i for i, c in enumerate(SYMBOLS + "=+-*/() >")}
    pairs = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    vocabulary["ll"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return EnvironmentContext(model_path=str(tmp_path), seed=3, directory=str(tmp_path))


@pytest.fixture
def start(context: EnvironmentContext, tmp_path: Path) -> Start:
    """Start an environment; ``records`` become the data set of a ``jsonl`` one."""

    def make(name: str = "jsonl", *, records: int = 8, **settings: Any) -> TextEnvironment:
        environment: TextEnvironment
        if name == "sort_symbols":
            environment = SortSymbols(SortSymbolsSettings(**settings))
        elif name == "reasoning_gym":
            prompt = "{metadata[expression]}="
            environment = ReasoningGym(ReasoningGymSettings(dataset="chain_sum", prompt=prompt, **settings))
        else:
            lines = [json.dumps({"prompt": f"{i}>", "answer": "hello"}) for i in range(records)]
            (tmp_path / "data.jsonl").write_text("\n".join(lines))
            environment = Jsonl(JsonlSettings(**{"path": "data.jsonl", "evaluation_share": 0.0, **settings}))
        environment.start(context)
        return environment

    return make


@pytest_asyncio.fixture(loop_scope="function")
async def scoring(context: EnvironmentContext, start: Start, tmp_path: Path) -> AsyncIterator[Any]:
    """A pool that scores the ``jsonl`` data set with the reward in ``code``, as a job's workers do."""
    start()
    async with AsyncExitStack() as stack:

        async def make(code: str, deadline: float = 60.0) -> ScoringPool:
            (tmp_path / "mine.py").write_text(code)
            spec = PluginSpec(
                role="environment", use="jsonl", settings={"path": "data.jsonl", "reward": "./mine.py:reward"}
            )
            pool = ScoringPool(
                python=sys.executable,
                factory="headrace.services.scoring:build_environment",
                arguments={"spec": msgspec.to_builtins(spec)},
                context=context,
                workers=1,
                deadline=deadline,
            )
            stack.push_async_callback(pool.close)
            await pool.start()
            return pool

        yield make


async def played(environment: TextEnvironment, answers: list[str]) -> list[Any]:
    """One episode per answer, each of another task."""
    episodes = []
    for index, answer in enumerate(answers):
        task = environment.task(index, split="train")
        tokens = completion([*environment.tokenizer.answer(answer)])
        episodes.append((task, await environment.run(task, Answers(tokens))))
    return episodes


async def test_B10_a_failed_generation_is_no_episode(start: Start) -> None:
    environment = start()
    with pytest.raises(ConnectionError, match="engine gone"):
        await environment.run(environment.task(0, split="train"), Answers(ConnectionError("engine gone")))


async def test_B10_a_failed_score_is_no_reward(scoring: Any, start: Start) -> None:
    pool = await scoring("def reward(answer):\n    return {'hello': 1.0, 'he': float('nan')}[answer]\n")
    outcomes = await pool.score_many(await played(start(), ["hello", "he", "llo"]))
    assert [o.reward if isinstance(o, Score) else o.reason for o in outcomes] == [1.0, "unscored", "KeyError"]


async def test_E01_the_sampled_tokens_are_kept_and_never_encoded_again(start: Start) -> None:
    environment = start()
    task = environment.task(0, split="train")
    episode = await environment.run(task, Answers(completion([1, 2, 4])))
    assert episode.text == "hello"
    assert environment.tokenizer.answer("hello").tolist() == [3, 4]
    assert episode.tokens[episode.loss_mask].tolist() == [1, 2, 4]
    assert environment.score(task, episode).reward == 1


async def test_E01_tokens_without_log_probs_are_refused(start: Start) -> None:
    environment = start()
    with pytest.raises(ContractError, match="3 tokens with 2 log-probs"):
        await environment.run(environment.task(0, split="train"), Answers(completion([1, 2, 4], logprobs=2)))


async def test_E03_no_token_is_added_to_an_answer(start: Start) -> None:
    environment = start()
    task = environment.task(0, split="train")
    episode = await environment.run(task, Answers(completion([1, 2])))
    assert episode.tokens.tolist() == [*environment.tokenizer.prompt(task.data["prompt"]), 1, 2]
    assert int(episode.loss_mask.sum()) == 2
    assert not episode.logprobs[~episode.loss_mask].any()


async def test_E08_an_empty_answer_is_an_episode_without_trained_tokens(start: Start) -> None:
    environment = start()
    task = environment.task(0, split="train")
    episode = await environment.run(task, Answers(completion([], finish="length")))
    assert (episode.text, episode.spans, int(episode.loss_mask.sum())) == ("", (), 0)
    assert environment.score(task, episode).reward == 0
    rows = [episode, await environment.run(task, Answers(completion([3, 4])))]
    batch = Batch(rows=np.arange(2), columns={"tokens": Ragged.from_arrays([e.tokens for e in rows])})
    assert batch.ragged("tokens").lengths.tolist() == [2, 4]


def test_H03_a_finite_stream_says_its_size_and_holds_each_prompt_once(start: Start) -> None:
    environment = start(records=10)
    assert environment.size("train") == 10
    assert len({environment.task(i, split="train").data["prompt"] for i in range(10)}) == 10
    assert start("sort_symbols").size("train") is None


async def test_I01_a_reward_that_never_ends_costs_its_own_score_only(scoring: Any, start: Start) -> None:
    code = (
        "import subprocess\ndef reward(answer):\n    while answer == 'he':\n        subprocess.run(['sleep', '1000'])\n"
    )
    pool = await scoring(code + "    return 1.0\n", deadline=3.0)
    outcomes = await pool.score_many(await played(start(), ["hello", "he", "llo", "he", "hello"]))
    assert [o.reward if isinstance(o, Score) else o.kind for o in outcomes] == [1.0, "deadline", 1.0, "deadline", 1.0]


async def test_I02_an_exception_is_contained_and_counted_by_type(scoring: Any, start: Start) -> None:
    pool = await scoring("def reward(answer):\n    return float(answer)\n")
    outcomes = await pool.score_many(await played(start(), ["1", "2", "3", "hello", "4", "5", "6", "7"]))
    failures = [o for o in outcomes if isinstance(o, ScoringFailure)]
    assert Counter(o.reason for o in failures) == {"ValueError": 1}
    assert [o.reward for o in outcomes if isinstance(o, Score)] == [1, 2, 3, 4, 5, 6, 7]
    assert "mine.py" in failures[0].detail
    assert "could not convert string to float: 'hello'" in failures[0].detail


async def test_I03_a_slow_judge_holds_neither_generation_nor_the_event_loop(
    scoring: Any, start: Start, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "verdict")
    code = f"def reward(answer):\n    return float(open({str(tmp_path / 'verdict')!r}).read())\n"
    pool, environment = await scoring(code), start()
    judged = asyncio.create_task(pool.score_many(await played(environment, ["hello"])))
    episodes = await played(environment, ["he"] * 8)
    assert len(episodes) == 8
    assert not judged.done()
    await asyncio.to_thread((tmp_path / "verdict").write_text, "0.5")  # returns when the judge reads
    (score,) = await judged
    assert score.reward == 0.5


async def test_I03_a_judge_that_is_down_is_asked_once_for_each_answer_and_ends_the_run_when_too_many_fail(
    scoring: Any, start: Start, tmp_path: Path
) -> None:
    """The limit on the share of failures breaks the circuit: nobody is asked again and again."""
    asked = tmp_path / "asked"
    code = f"""import socket
def reward(answer):
    open({str(asked)!r}, "a").write(answer + chr(10))
    socket.socket(socket.AF_UNIX).connect({str(tmp_path / "judge")!r})
"""
    pool, environment = await scoring(code), start()
    answers = ["he"] * 8
    outcomes = await pool.score_many(await played(environment, answers))
    failures = [outcome for outcome in outcomes if isinstance(outcome, ScoringFailure)]
    assert Counter(failure.reason for failure in failures) == {"FileNotFoundError": 8}
    assert asked.read_text().split() == answers
    assert len(await played(environment, answers)) == 8, "generation goes on"
    circuit = FailureShare(window=8, limit=0.5)
    for failure in failures[:4]:
        circuit.record(trajectories=1, failed={failure.reason: 1}, detail=failure.detail)
    with pytest.raises(RunError, match="FileNotFoundError"):
        circuit.record(trajectories=1, failed={failures[4].reason: 1}, detail=failures[4].detail)


@pytest.mark.parametrize("name", ["sort_symbols", "reasoning_gym", "jsonl"])
@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_K03_a_stream_is_resumed_by_its_position_alone(start: Start, name: str, split: Split) -> None:
    share = {"evaluation_share": 0.5, "records": 60} if name == "jsonl" else {}
    whole = [start(name, **share).task(i, split=split) for i in range(10)]
    resumed = start(name, **share)
    assert [resumed.task(i, split=split) for i in range(6, 10)] == whole[6:]
    assert len({task.id for task in whole}) == 10


def test_L05_the_whole_evaluation_set_can_be_scored(start: Start, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"test {i}>", "answer": "he"}) for i in range(10)]
    (tmp_path / "test.jsonl").write_text("\n".join(lines))
    environment = start(evaluation_path="test.jsonl")
    assert environment.size("evaluation") == 10
    tasks = [environment.task(i, split="evaluation") for i in range(10)]
    assert [t.data["prompt"] for t in tasks] == [f"test {i}>" for i in range(10)]
    assert all(environment.score(t, environment.demonstration(t)).reward == 1 for t in tasks)


def test_L05_evaluation_neither_shares_nor_moves_training_tasks(start: Start) -> None:
    environment, quiet = start("sort_symbols"), start("sort_symbols")
    seen = []
    for index in range(30):
        seen.append(environment.task(index, split="train"))
        environment.task(index, split="evaluation")
    assert seen == [quiet.task(i, split="train") for i in range(30)]
    held_out = {"".join(sorted(quiet.task(i, split="evaluation").data["answer"])) for i in range(30)}
    assert held_out.isdisjoint(task.data["answer"] for task in seen)


def test_every_environment_scores_its_own_demonstrations_right(start: Start) -> None:
    for name in ("sort_symbols", "reasoning_gym", "jsonl"):
        environment = start(name)
        for index in range(8):
            task = environment.task(index, split="train")
            shown: Episode = environment.demonstration(task)
            assert environment.score(task, shown).reward == 1
