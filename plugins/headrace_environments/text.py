"""What every single-turn text environment shares: prompt text in, one generation, decoded answer out, one reward.

A subclass says which tasks there are. A task's ``data`` holds ``prompt``, ``answer`` (the text to imitate and, for
``exact``, to match; None where a problem has none) and ``record`` (the task's own fields, for rewards).

Invariants: the tokens of an episode are the tokens that were sampled, never text encoded again; and a built-in
reward pays only for an answer that the policy itself ended.
"""

from __future__ import annotations

import asyncio
import difflib
import re
import string
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import numpy as np

from headrace.contract import (
    Array,
    Demonstrations,
    Environment,
    EnvironmentContext,
    Episode,
    GenerationSession,
    ModelFacts,
    Score,
    Task,
    TaskLengths,
)
from headrace.errors import ConfigError, ContractError
from headrace_environments.chat import ChatSettings, ChatTemplate
from headrace_environments.rewards import load_reward
from headrace_environments.tokenizer import TextTokenizer, shorten

PROMPTS_KEPT = 64
"""Prompts whose tokens are remembered."""
LONG_TEXT = 1 << 14
"""Characters that are made into tokens in a thread: on the event loop they would hold up everything else."""

A = TypeVar("A")
B = TypeVar("B")
Scorer: TypeAlias = Callable[[Task, Episode], Score]
Origin: TypeAlias = Callable[[str], str]


class TextEnvironment(Environment, Demonstrations):
    """Base of the text environments. ``Settings`` must have ``reward``: the name of one of
    :meth:`built_in_rewards`, ``"module:function"`` or ``"./file.py:function"``. With :class:`ChatSettings` as their
    base, tasks can be put through the model's chat template."""

    tokenizer: TextTokenizer
    context: EnvironmentContext
    _scorer: Scorer
    _chat: ChatTemplate | None = None

    @classmethod
    def preflight(cls, settings: Any, *, directory: str, origin: Origin) -> None:
        """The part of :meth:`start` that needs no model."""
        cls(settings)._prepare(directory, origin)

    @classmethod
    def check_model(cls, settings: Any, model: ModelFacts, *, directory: str, origin: Origin) -> TaskLengths | None:
        """A :meth:`start` with the model's tokenizer, or with one of the same characters."""
        environment = cls(settings)
        context = EnvironmentContext(model_path=model.path or "", seed=0, directory=directory)
        if model.path is not None:
            tokenizer = TextTokenizer.load(model.path, origin=f"{model.origin}: ")
        elif environment._chats:
            raise ConfigError(
                "chat = true, and a model that is made at start has no chat template",
                origin=origin("chat"),
                fix='remove chat, or choose a model that was trained to chat: write [model] path = "FOLDER"',
            )
        elif model.characters is not None:
            tokenizer = TextTokenizer.of_characters(model.characters, begins=model.begins, origin=model.origin)
        else:
            return None
        return environment._begin(context, tokenizer, origin)

    def start(self, context: EnvironmentContext) -> None:
        tokenizer = TextTokenizer.load(context.model_path)
        self._begin(context, tokenizer, lambda key: f"[environment] {key} = {getattr(self.settings, key)!r}")

    def _begin(self, context: EnvironmentContext, tokenizer: TextTokenizer, origin: Origin) -> TaskLengths:
        self.context, self.tokenizer = context, tokenizer
        if self._chats:
            self._chat = ChatTemplate.load(context.model_path, system=self.settings.system, origin=origin("chat"))
        self._prompts: dict[str, Array] = {}
        self._asking = asyncio.Lock()
        self._prepare(context.directory, origin)
        return self.check()

    @property
    def _chats(self) -> bool:
        return isinstance(self.settings, ChatSettings) and self.settings.chat

    def read(self, directory: str, origin: Origin) -> None:
        """Find and read the data that :meth:`task` needs. ConfigError when a setting or a file is wrong; paths are
        relative to ``directory``, ``origin(key)`` is where a setting was written."""

    @abstractmethod
    def check(self) -> TaskLengths:
        """Called by :meth:`start`, last: how long the tasks are. ConfigError when the vocabulary cannot spell them."""

    def built_in_rewards(self) -> Mapping[str, Scorer]:
        """Rewards that this environment knows by name."""
        return {"exact": exact}

    def record(self, task: Task) -> Mapping[str, Any]:
        """What a reward sees as ``record``."""
        record: Mapping[str, Any] = task.data["record"]
        return record

    async def run(self, task: Task, session: GenerationSession) -> Episode:
        async with self._asking:  # the other members of a group wait for the first one's tokens
            prompt = await _aside(self._prompt, task, long=len(task.data["prompt"]) >= LONG_TEXT)
        completion = await session.generate(prompt, stop_token_ids=self.tokenizer.stops)
        if len(completion.token_ids) != len(completion.logprobs):
            raise ContractError(
                f"the engine gave {len(completion.token_ids)} tokens with {len(completion.logprobs)} log-probs",
                origin=f"task {task.id}",
                fix="an inference engine must give one log-prob per sampled token",
            )
        tokens = completion.token_ids
        text = await _aside(self.tokenizer.decode, tokens, long=len(tokens) >= LONG_TEXT)
        return Episode.single_turn(prompt, completion, text=text)

    def score(self, task: Task, episode: Episode) -> Score:
        return self._scorer(task, episode)

    def demonstration(self, task: Task) -> Episode:
        if task.data["answer"] is None:
            raise ConfigError(
                "this environment's tasks have no answer to imitate",
                origin=f"task {task.id}",
                fix="train on it with a reward, or choose tasks that come with answers",
            )
        prompt, answer = self._prompt(task), self.tokenizer.answer(task.data["answer"])
        length = len(prompt) + len(answer)
        return Episode(
            tokens=np.concatenate([prompt, answer]),
            loss_mask=np.arange(length) >= len(prompt),
            logprobs=np.zeros(length, dtype=np.float32),
            spans=(),
            finish_reason="stop",
            text=task.data["answer"],
        )

    def check_texts(self, tasks: Iterable[Task], *, origin: str) -> TaskLengths:
        """How long ``tasks`` are. ConfigError when the vocabulary cannot spell a prompt or an answer of one."""
        longest, text, answers = 0, "", set[int]()
        for task in tasks:
            length = len(self._prompt(task))
            if length > longest:
                longest, text = length, task.data["prompt"]
            if task.data["answer"] is not None:
                self.tokenizer.check([task.data["answer"]], origin=f"{origin}, task {task.id}")
                answers.add(len(self.tokenizer.answer(task.data["answer"])))
        return TaskLengths(
            longest_prompt=longest,
            longest_text=shorten(text),
            shortest_answer=min(answers, default=None),
            exact=self._scorer is exact,
        )

    def _prompt(self, task: Task) -> Array:
        """int32 [P], not to be written to: what the policy is asked with. All members of a group ask the same."""
        text = task.data["prompt"]
        prompt = self._prompts.get(text)
        if prompt is None:
            if len(self._prompts) >= PROMPTS_KEPT:
                self._prompts.clear()
            prompt = self._prompts[text] = self._encoded(text)
            prompt.flags.writeable = False
        return prompt

    def _encoded(self, text: str) -> Array:
        if self._chat is None:
            return self.tokenizer.prompt(text)
        return self.tokenizer.prompt(self._chat.render(text), whole=True)

    def _prepare(self, directory: str, origin: Origin) -> None:
        self._scorer = self._choose_reward(directory, origin("reward"))
        self.read(directory, origin)

    def _choose_reward(self, directory: str, origin: str) -> Scorer:
        built_in, use = self.built_in_rewards(), self.settings.reward
        if use in built_in:
            return built_in[use]
        if ":" not in use:
            close = difflib.get_close_matches(use, built_in, n=1)
            raise ConfigError(
                f"there is no reward {use!r} here; built in: {', '.join(sorted(built_in))}"
                + (f". Did you mean {close[0]!r}?" if close else ""),
                origin=origin,
                fix='name a built-in reward, or your own: reward = "./file.py:function"',
            )
        reward = load_reward(use, directory=directory, origin=origin)

        def scorer(task: Task, episode: Episode) -> Score:
            return reward(
                {
                    "prompt": task.data["prompt"],
                    "answer": episode.text,
                    "record": dict(self.record(task)),
                    "finish_reason": episode.finish_reason,
                }
            )

        return scorer


async def _aside(function: Callable[[A], B], argument: A, *, long: bool) -> B:
    """``function(argument)``, in a thread when it takes ``long``."""
    return await asyncio.to_thread(function, argument) if long else function(argument)


def exact(task: Task, episode: Episode) -> Score:
    """1 when the policy wrote exactly the task's answer and ended it, else 0."""
    right = finished(episode) and episode.text == task.data["answer"]
    return Score(reward=float(right))


def finished(episode: Episode) -> bool:
    """Whether the policy ended its answer itself."""
    return episode.finish_reason == "stop"


def render(template: str, fields: Mapping[str, Any], *, setting: str, origin: str) -> str:
    """``template`` with ``{field}`` and ``{field[key]}`` filled in. ConfigError names a field that is missing."""
    fix = "write {field} or {field[key]} for a field that every record has, {{ for {"
    if attribute := _attribute(template):
        message = f"{setting} = {template!r} asks for {{{attribute}}}, an attribute, and records have fields alone"
        raise ConfigError(message, origin=origin, fix=fix)
    try:
        return string.Formatter().vformat(template, (), fields)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, KeyError | IndexError | AttributeError | TypeError):
            message = f"{setting} = {template!r} needs {error}, which this record lacks; it has {_fields(fields)}"
        else:
            message = f"{setting} = {template!r} is not a template: {error}"
        raise ConfigError(message, origin=origin, fix=fix) from None


@lru_cache(maxsize=64)
def _attribute(template: str) -> str:
    """The first field of ``template`` that reads an attribute; "" when none does, or it is no template."""
    try:
        for _, field, inner, _ in string.Formatter().parse(template):
            if field is not None and "." in re.sub(r"\[[^]]*\]", "", field):
                return field
            if inner and (found := _attribute(inner)):
                return found
    except ValueError:  # of which more is said where it is rendered
        pass
    return ""


def _fields(fields: Mapping[str, Any]) -> str:
    inner = [f"{name}[{key}]" for name, value in fields.items() if isinstance(value, Mapping) for key in value]
    return ", ".join([*map(str, fields), *inner]) or "none"
