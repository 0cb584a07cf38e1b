"""The demo's task: a pure function of (seed, split, index), with splits that share no set of symbols."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from headrace.contract import EnvironmentContext
from headrace_environments.sort_symbols import SYMBOLS, SortSymbols, SortSymbolsSettings


@pytest.fixture
def environment(context: EnvironmentContext) -> SortSymbols:
    environment = SortSymbols(SortSymbolsSettings())
    environment.start(context)
    return environment


def test_the_answer_is_the_prompts_symbols_in_order(environment: SortSymbols) -> None:
    for index in range(200):
        data = environment.task(index, split="train").data
        symbols = data["prompt"][:-1]
        assert data["prompt"][-1] == "="
        assert len(set(symbols)) == len(symbols)
        assert data["answer"] == "".join(c for c in SYMBOLS if c in symbols)


def test_a_task_depends_on_seed_split_and_index_alone(environment: SortSymbols, context: EnvironmentContext) -> None:
    again = SortSymbols(SortSymbolsSettings())
    again.start(context)
    forward = [environment.task(i, split="train") for i in range(50)]
    assert [again.task(i, split="train") for i in reversed(range(50))] == forward[::-1]
    other = SortSymbols(SortSymbolsSettings())
    other.start(dataclasses.replace(context, seed=8))
    assert all(other.task(i, split="train") != forward[i] for i in range(50))
    assert len({t.id for t in forward}) == 50


def test_the_first_tasks_are_the_same_in_every_run(environment: SortSymbols) -> None:
    assert [environment.task(i, split="train").id for i in range(3)] == ["kyt", "3eaqjrczxb64d0wtoylikn95", "8xkn2"]
    assert environment.task(0, split="evaluation").id == "5luer"


def test_the_splits_share_no_set_of_symbols_whatever_the_seed(context: EnvironmentContext) -> None:
    sets: dict[str, set[str]] = {"train": set(), "evaluation": set()}
    for seed in range(3):
        environment = SortSymbols(SortSymbolsSettings(median=3, longest=4))
        environment.start(dataclasses.replace(context, seed=seed))
        for split in ("train", "evaluation"):
            sets[split] |= {environment.task(i, split=split).data["answer"] for i in range(1500)}
    assert not sets["train"] & sets["evaluation"]
    assert len(sets["evaluation"]) > 500


def test_lengths_are_log_normal_and_clipped_in_both_splits(environment: SortSymbols) -> None:
    for split in ("train", "evaluation"):
        lengths = [len(environment.task(i, split=split).data["answer"]) for i in range(1000)]
        assert (min(lengths), np.median(lengths), max(lengths)) == (3, 8, 32)
        assert abs(np.std(np.log(lengths)) - 0.6) < 0.08


@pytest.mark.parametrize("settings", [{"shortest": 1}, {"longest": 35}, {"shortest": 9, "longest": 8}, {"median": 0}])
def test_impossible_lengths_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        SortSymbolsSettings(**settings)


def test_symbols_may_come_again_where_prompts_are_longer_than_there_are_symbols(context: EnvironmentContext) -> None:
    environment = SortSymbols(SortSymbolsSettings(median=60, sigma=0.2, longest=90, distinct=False))
    environment.start(context)
    answers: dict[str, set[str]] = {}
    for split in ("train", "evaluation"):
        tasks = [environment.task(index, split=split).data for index in range(40)]
        assert all(data["answer"] == "".join(sorted(data["prompt"][:-1])) for data in tasks)
        answers[split] = {data["answer"] for data in tasks}
    assert max(map(len, answers["train"])) > len(SYMBOLS)
    assert not answers["train"] & answers["evaluation"]
