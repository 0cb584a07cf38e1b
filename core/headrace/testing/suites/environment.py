"""The rules of the ``environment`` role.

class TestMyEnvironment(EnvironmentContract):
    @pytest.fixture
    def plugin(self) -> Environment:
        return MyEnvironment(MyEnvironment.Settings())
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.contract import (
    Array,
    Completion,
    Demonstrations,
    Environment,
    EnvironmentContext,
    Episode,
    ModelFacts,
    Split,
    Task,
    VersionSpan,
)
from headrace.testing.suites.plugin import PluginContract
from headrace.testing.suites.rules import check, override, rule

SPLITS: tuple[Split, ...] = ("train", "evaluation")
LOOKED_AT = 64
"""Tasks per split that a rule looks at."""
VERSION = 3
ANSWERED = 5
"""Tokens that :class:`EchoSession` answers with."""


class EchoSession:
    """A generation session that answers with the prompt's last tokens, backwards, and remembers what it was asked."""

    def __init__(self) -> None:
        self.prompts: list[Array] = []
        self.completions: list[Completion] = []

    async def generate(
        self, prompt: Array, *, stop_token_ids: tuple[int, ...] = (), max_new_tokens: int | None = None
    ) -> Completion:
        tokens = np.array(prompt, dtype=np.int32)[::-1][:ANSWERED]
        if max_new_tokens is not None:
            tokens = tokens[:max_new_tokens]
        completion = Completion(
            token_ids=tokens,
            logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32) / 8,
            spans=(VersionSpan(version=VERSION, start=0, stop=len(tokens)),),
            finish_reason="length",
        )
        self.prompts.append(prompt)
        self.completions.append(completion)
        return completion

    def sampled(self) -> list[tuple[int, float]]:
        """(token, log-prob) of all that was sampled, in order."""
        return [
            (token, logprob)
            for completion in self.completions
            for token, logprob in zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True)
        ]


class EnvironmentContract(PluginContract):
    """Subclass it and override :meth:`plugin`; :meth:`model_path` where prompts are text, :meth:`directory` where
    settings name files."""

    @pytest.fixture
    def plugin(self) -> Environment:
        """A constructed environment; the suite starts it."""
        override("plugin", "an environment, constructed and not started")

    @pytest.fixture
    def model_path(self, tmp_path: Path) -> str:
        """A folder with the tokenizer files that the environment reads."""
        return str(tmp_path)

    @pytest.fixture
    def context(self, model_path: str, directory: str) -> EnvironmentContext:
        """What the suite starts environments with."""
        return EnvironmentContext(model_path=model_path, seed=7, directory=directory)

    @rule("`check_model` accepts the model that the environment is started with, and one of which nothing is known.")
    def test_check_model_accepts_what_can_be_started_with(
        self, plugin: Environment, context: EnvironmentContext
    ) -> None:
        for path in (context.model_path, None):
            facts = ModelFacts(origin="the suite's model", path=path)
            type(plugin).check_model(
                plugin.settings, facts, directory=context.directory, origin=lambda key: f"the suite's {key}"
            )

    @rule(
        "A task is a function of settings, seed, index and split alone: another instance gives the same, in any order."
    )
    def test_a_task_depends_on_settings_seed_index_and_split_alone(
        self, plugin: Environment, context: EnvironmentContext
    ) -> None:
        plugin.start(context)
        again = _another(plugin, context)
        for split in SPLITS:
            indices = _indices(plugin, split)
            first = [plugin.task(index, split=split) for index in indices]
            second = [again.task(index, split=split) for index in reversed(indices)][::-1]
            for index, one, other in zip(indices, first, second, strict=True):
                check(one == other, f"task {index} of {split} is {one}, and {other} in another instance")

    @rule("The splits share no task.")
    def test_the_splits_share_no_task(self, plugin: Environment, context: EnvironmentContext) -> None:
        plugin.start(context)
        train, held_out = ({task.id for task in _tasks(plugin, split)} for split in SPLITS)
        check(not train & held_out, f"both splits have the tasks {sorted(train & held_out)[:3]}")

    @rule("An id is stable: the same problem has the same id in every run, whatever seed and index brought it.")
    def test_the_same_problem_has_the_same_id(self, plugin: Environment, context: EnvironmentContext) -> None:
        plugin.start(context)
        other = _another(plugin, dataclasses.replace(context, seed=context.seed + 1))
        ids: dict[str, str] = {}
        for environment in (plugin, other):
            for split in SPLITS:
                for task in _tasks(environment, split):
                    problem = json.dumps(task.data, sort_keys=True, default=repr)
                    known = ids.setdefault(problem, task.id)
                    check(known == task.id, f"the problem {problem} has the ids {known!r} and {task.id!r}")

    @rule("A task's data are plain values (text, numbers, lists, maps): it travels between processes.")
    def test_a_task_holds_plain_values(self, plugin: Environment, context: EnvironmentContext) -> None:
        plugin.start(context)
        for split in SPLITS:
            for task in _tasks(plugin, split):
                back = json.loads(json.dumps(task.data))
                check(back == task.data, f"task {task.id!r} of {split} comes back from JSON as {back}, not {task.data}")

    @rule("`size` is the number of distinct tasks of a split, or None for an endless stream.")
    def test_size_counts_distinct_tasks(self, plugin: Environment, context: EnvironmentContext) -> None:
        plugin.start(context)
        for split in SPLITS:
            size = plugin.size(split)
            check(size is None or size >= 1, f"the size of {split} is {size}")
            if size is not None:
                plugin.task(size - 1, split=split)
                ids = [task.id for task in _tasks(plugin, split)]
                check(len(set(ids)) == len(ids), f"{len(ids)} of {size} tasks of {split} have {len(set(ids))} ids")

    @rule("An episode is played through its session: every token of the policy comes from `generate`.")
    async def test_an_episode_is_played_through_its_session(
        self, plugin: Environment, context: EnvironmentContext
    ) -> None:
        session, _, _ = await _play(plugin, context)
        check(session.prompts, "`generate` was never called")
        for prompt in session.prompts:
            right = isinstance(prompt, np.ndarray) and prompt.dtype == np.int32 and prompt.ndim == 1 and len(prompt)
            check(right, f"`generate` was given {prompt!r} for a prompt; expected a non-empty int32 array")

    @rule("`loss_mask` is True exactly where the policy sampled the token, and never at position 0.")
    async def test_the_mask_marks_exactly_the_sampled_tokens(
        self, plugin: Environment, context: EnvironmentContext
    ) -> None:
        session, _, episode = await _play(plugin, context)
        marked = episode.tokens[np.asarray(episode.loss_mask, dtype=bool)].tolist()
        sampled = [token for token, _ in session.sampled()]
        check(marked == sampled, f"the mask marks tokens {marked}; sampled were {sampled}")
        check(not episode.loss_mask[0], "the mask marks position 0, which nothing predicts")

    @rule("An episode's log-probs are those of the session, at the sampled tokens, and 0 elsewhere.")
    async def test_log_probs_are_the_session_s_and_0_elsewhere(
        self, plugin: Environment, context: EnvironmentContext
    ) -> None:
        session, _, episode = await _play(plugin, context)
        there = np.flatnonzero(episode.logprobs)
        found = list(zip(episode.tokens[there].tolist(), episode.logprobs[there].tolist(), strict=True))
        check(
            found == session.sampled(), f"log-probs that are not 0 stand at {found}; sampled were {session.sampled()}"
        )

    @rule("An episode's spans cover exactly the sampled tokens, under the versions that the session reported.")
    async def test_spans_cover_exactly_the_sampled_tokens(
        self, plugin: Environment, context: EnvironmentContext
    ) -> None:
        session, _, episode = await _play(plugin, context)
        covered = [token for span in episode.spans for token in episode.tokens[span.start : span.stop].tolist()]
        sampled = [token for token, _ in session.sampled()]
        check(covered == sampled, f"spans {episode.spans} cover tokens {covered}; sampled were {sampled}")
        versions = {span.version for span in episode.spans}
        check(versions <= {VERSION}, f"the session reported version {VERSION}, the episode says {sorted(versions)}")

    @rule("Tokens are int32, the mask bool and log-probs float32.")
    async def test_an_episode_s_arrays_have_their_dtypes(
        self, plugin: Environment, context: EnvironmentContext
    ) -> None:
        _, _, episode = await _play(plugin, context)
        found = [array.dtype.name for array in (episode.tokens, episode.loss_mask, episode.logprobs)]
        check(found == ["int32", "bool", "float32"], f"tokens, mask and log-probs are {', '.join(found)}")

    @rule(
        "`score` is pure: called again, or in another process, it gives the same, and it changes nothing it is given."
    )
    async def test_a_score_depends_on_task_and_episode_alone(
        self, plugin: Environment, context: EnvironmentContext
    ) -> None:
        _, task, episode = await _play(plugin, context)
        before = _plain(task, episode)
        scores = [environment.score(task, episode) for environment in (plugin, plugin, _another(plugin, context))]
        for later in scores[1:]:
            check(_same(scores[0].reward, later.reward), f"the rewards are {[score.reward for score in scores]}")
        check(_plain(task, episode) == before, "scoring changed the task or the episode")

    @rule("A demonstration imitates an answer: mask True on the answer alone, log-probs 0, no spans.")
    def test_a_demonstration_is_an_answer_to_imitate(self, plugin: Environment, context: EnvironmentContext) -> None:
        if not isinstance(plugin, Demonstrations):
            pytest.skip(f"{type(plugin).__name__} is not Demonstrations")
        plugin.start(context)
        for task in _tasks(plugin, "train")[:8]:
            episode = plugin.demonstration(task)
            check(
                episode.loss_mask.any() and not episode.loss_mask[0],
                f"the mask of task {task.id!r} marks {int(episode.loss_mask.sum())} tokens, position 0: "
                f"{bool(episode.loss_mask[0])}",
            )
            check(not episode.logprobs.any(), f"the demonstration of task {task.id!r} has log-probs that are not 0")
            check(not episode.spans, f"the demonstration of task {task.id!r} has spans {episode.spans}")


def _another(plugin: Environment, context: EnvironmentContext) -> Environment:
    """A second instance with the same settings, as another process would make it."""
    another = type(plugin)(plugin.settings)
    another.start(context)
    return another


def _indices(plugin: Environment, split: Split) -> range:
    size = plugin.size(split)
    return range(LOOKED_AT if size is None else min(size, LOOKED_AT))


def _tasks(plugin: Environment, split: Split) -> Sequence[Task]:
    return [plugin.task(index, split=split) for index in _indices(plugin, split)]


async def _play(plugin: Environment, context: EnvironmentContext) -> tuple[EchoSession, Task, Episode]:
    """Start ``plugin`` and play the first task."""
    plugin.start(context)
    session, task = EchoSession(), plugin.task(0, split="train")
    return session, task, await plugin.run(task, session)


def _plain(task: Task, episode: Episode) -> tuple[object, ...]:
    arrays = (episode.tokens, episode.loss_mask, episode.logprobs)
    return (json.dumps(task.data), episode.text, episode.spans, *(array.tobytes() for array in arrays))


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
