"""Environments that break one rule each; ``breaks`` names the rule's test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.contract import Environment, Episode, GenerationSession, ModelFacts, Score, Split, Task, VersionSpan
from headrace.errors import ConfigError
from headrace.testing import FakeEnvironment
from headrace.testing.suites import EnvironmentContract


class Broken(EnvironmentContract):
    """Subclasses say which environment."""

    Kind: type[FakeEnvironment]
    settings: dict[str, Any] = {}  # noqa: RUF012  # never changed

    @pytest.fixture
    def plugin(self) -> Environment:
        return self.Kind(FakeEnvironment.Settings(**self.settings))


class TestWantsToKnowEverything(Broken):
    breaks = "test_check_model_accepts_what_can_be_started_with"

    class Kind(FakeEnvironment):
        @classmethod
        def check_model(cls, settings: Any, model: ModelFacts, *, directory: str, origin: Callable[[str], str]) -> None:
            if model.max_length is None:
                raise ConfigError("how long is a sequence?", origin=model.origin, fix="say it")


class TestCountsItsCalls(Broken):
    breaks = "test_a_task_depends_on_settings_seed_index_and_split_alone"

    class Kind(FakeEnvironment):
        calls = 0

        def task(self, index: int, *, split: Split) -> Task:
            self.calls += 1
            return super().task(self.calls, split=split)


class TestLeaksTheHeldOut(Broken):
    breaks = "test_the_splits_share_no_task"

    class Kind(FakeEnvironment):
        def task(self, index: int, *, split: Split) -> Task:
            return super().task(index, split="train")


class TestNumbersItsTasks(Broken):
    breaks = "test_the_same_problem_has_the_same_id"

    class Kind(FakeEnvironment):
        def task(self, index: int, *, split: Split) -> Task:
            return dataclasses.replace(super().task(index, split=split), id=f"{split}-{index}")


class TestTravelsBadly(Broken):
    breaks = "test_a_task_holds_plain_values"

    class Kind(FakeEnvironment):
        def task(self, index: int, *, split: Split) -> Task:
            task = super().task(index, split=split)
            return dataclasses.replace(task, data={**task.data, "pair": (1, 2)})


class TestRepeatsItself(Broken):
    breaks = "test_size_counts_distinct_tasks"
    settings = {"size": 10}  # noqa: RUF012  # never changed

    class Kind(FakeEnvironment):
        def task(self, index: int, *, split: Split) -> Task:
            return super().task(index % 5, split=split)


class TestMakesItUp(Broken):
    breaks = "test_an_episode_is_played_through_its_session"

    class Kind(FakeEnvironment):
        async def run(self, task: Task, session: GenerationSession) -> Episode:
            tokens = np.array(task.data["prompt"], dtype=np.int32)
            return Episode(
                tokens=tokens,
                loss_mask=np.zeros(len(tokens), dtype=bool),
                logprobs=np.zeros(len(tokens), dtype=np.float32),
                spans=(),
                finish_reason="stop",
            )


class Rewrites(FakeEnvironment):
    """Changes one field of its episodes."""

    async def run(self, task: Task, session: GenerationSession) -> Episode:
        episode = await super().run(task, session)
        return dataclasses.replace(episode, **self.rewrite(episode))

    def rewrite(self, episode: Episode) -> dict[str, Any]:
        raise NotImplementedError


class TestTrainsItsPrompt(Broken):
    breaks = "test_the_mask_marks_exactly_the_sampled_tokens"

    class Kind(Rewrites):
        def rewrite(self, episode: Episode) -> dict[str, Any]:
            return {"loss_mask": np.arange(len(episode.tokens)) >= 1}


class TestShiftsItsLogProbs(Broken):
    breaks = "test_log_probs_are_the_session_s_and_0_elsewhere"

    class Kind(Rewrites):
        def rewrite(self, episode: Episode) -> dict[str, Any]:
            return {"logprobs": np.roll(episode.logprobs, -1)}


class TestKeepsResponseCoordinates(Broken):
    breaks = "test_spans_cover_exactly_the_sampled_tokens"

    class Kind(Rewrites):
        def rewrite(self, episode: Episode) -> dict[str, Any]:
            first = episode.spans[0].start
            return {
                "spans": tuple(
                    VersionSpan(version=s.version, start=s.start - first, stop=s.stop - first) for s in episode.spans
                )
            }


class TestWidensItsTokens(Broken):
    breaks = "test_an_episode_s_arrays_have_their_dtypes"

    class Kind(Rewrites):
        def rewrite(self, episode: Episode) -> dict[str, Any]:
            return {"tokens": episode.tokens.astype(np.int64)}


class TestScoresByMood(Broken):
    breaks = "test_a_score_depends_on_task_and_episode_alone"

    class Kind(FakeEnvironment):
        calls = 0

        def score(self, task: Task, episode: Episode) -> Score:
            self.calls += 1
            return Score(reward=float(self.calls))


class TestDemonstratesItsPrompt(Broken):
    breaks = "test_a_demonstration_is_an_answer_to_imitate"

    class Kind(FakeEnvironment):
        def demonstration(self, task: Task) -> Episode:
            episode = super().demonstration(task)
            return dataclasses.replace(episode, loss_mask=np.ones(len(episode.tokens), dtype=bool))
