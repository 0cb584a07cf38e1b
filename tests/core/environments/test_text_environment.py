"""What all text environments share, seen through the smallest of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.contract import Completion, EnvironmentContext, Episode, FinishReason, Task, VersionSpan
from headrace.errors import ConfigError, ContractError
from headrace_environments.sort_symbols import SortSymbols, SortSymbolsSettings
from headrace_environments.text import render


def started(context: EnvironmentContext, reward: str = "exact") -> SortSymbols:
    environment = SortSymbols(SortSymbolsSettings(reward=reward))
    environment.start(context)
    return environment


def task(prompt: str = "31=", answer: str = "13") -> Task:
    return Task(id="t", data={"prompt": prompt, "answer": answer, "record": {"level": 2}})


def episode(text: str, finish_reason: FinishReason = "stop") -> Episode:
    completion = Completion(token_ids=np.array([9]), logprobs=np.array([-1.0]), spans=(), finish_reason=finish_reason)
    return Episode.single_turn(np.array([1]), completion, text=text)


async def test_an_episode_is_one_generation_of_the_prompts_tokens(context: EnvironmentContext, session) -> None:
    environment, answering = started(context), session([4, 6, 2])
    played = await environment.run(task(), answering)
    assert [p.tolist() for p in answering.prompts] == [[6, 4, 39]]
    assert answering.stops == [(2,)]
    assert played.tokens.tolist() == [6, 4, 39, 4, 6, 2]
    assert played.loss_mask.tolist() == [False, False, False, True, True, True]
    assert played.logprobs.tolist() == [0, 0, 0, -1, -2, -3]
    assert played.spans == (VersionSpan(version=5, start=3, stop=6),)
    assert (played.text, played.finish_reason) == ("13", "stop")
    assert environment.score(task(), played).reward == 1


async def test_an_answer_that_was_cut_off_is_worth_nothing_even_if_it_matches(
    context: EnvironmentContext, session
) -> None:
    environment = started(context)
    played = await environment.run(task(), session([4, 6], "length"))
    assert played.text == "13"
    assert environment.score(task(), played).reward == 0


async def test_a_special_token_inside_the_answer_makes_it_wrong(context: EnvironmentContext, session) -> None:
    environment = started(context)
    assert environment.score(task(), await environment.run(task(), session([4, 0, 6, 2]))).reward == 0


def test_the_demonstration_is_the_answer_with_eos_and_only_it_is_trained(context: EnvironmentContext) -> None:
    environment = started(context)
    shown = environment.demonstration(task())
    assert shown.tokens.tolist() == [6, 4, 39, 4, 6, 2]
    assert shown.loss_mask.tolist() == [False, False, False, True, True, True]
    assert shown.logprobs.tolist() == [0.0] * 6
    assert (shown.tokens.dtype, shown.loss_mask.dtype, shown.logprobs.dtype) == (np.int32, bool, np.float32)
    assert (shown.spans, shown.finish_reason) == ((), "stop")
    assert environment.score(task(), shown).reward == 1


def test_a_reward_file_replaces_the_built_in_reward(context: EnvironmentContext, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def reward(prompt, answer, record):\n"
        "    return len(answer) / 4, {'level': record['level'], 'asks': prompt.endswith('=')}\n"
    )
    score = started(context, "./mine.py:reward").score(task(), episode("31"))
    assert score.reward == 0.5
    assert score.components == {"level": 2.0, "asks": 1.0}


def test_a_reward_names_only_what_it_uses(context: EnvironmentContext, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def reward(finish_reason, scale=3):\n    return scale * (finish_reason == 'length')\n"
        "def every(**all):\n    return sorted(all) == ['answer', 'finish_reason', 'prompt', 'record']\n"
    )
    assert started(context, "./mine.py:reward").score(task(), episode("", "length")).reward == 3
    assert started(context, "./mine.py:every").score(task(), episode("")).reward == 1


def test_a_reward_may_come_from_a_module_and_is_checked_like_a_file(context: EnvironmentContext) -> None:
    with pytest.raises(ConfigError, match=r"asks for x; a reward may ask, by name, for prompt, answer, record"):
        started(context, "math:sqrt")
    with pytest.raises(ConfigError, match="'math:hypot' does not say what it asks for"):
        started(context, "math:hypot")
    with pytest.raises(ConfigError, match="module 'no_such_module' cannot be imported"):
        started(context, "no_such_module:reward")


def test_a_reward_that_cannot_score_gives_nan(context: EnvironmentContext, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(answer):\n    return float('nan')\n")
    assert np.isnan(started(context, "./mine.py:reward").score(task(), episode("")).reward)


@pytest.mark.parametrize("result", ["None", "'1'", "[1]", "(1, 2)", "(1, {'part': None})", "1j"])
def test_anything_but_a_number_is_an_error_not_a_score(
    context: EnvironmentContext, tmp_path: Path, result: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def reward(answer):\n    return {result}\n")
    environment = started(context, "./mine.py:reward")
    with pytest.raises(ContractError, match=r"reward '\./mine\.py:reward' returned"):
        environment.score(task(), episode(""))


@pytest.mark.parametrize(
    ("use", "content", "message"),
    [
        ("exakt", "", "there is no reward 'exakt' here; built in: exact"),
        ("./absent.py:reward", "", r"there is no reward file .*absent\.py"),
        ("./mine.py:reword", "def reward(answer): ...", "no function 'reword'; it defines: reward. Did you mean"),
        ("./mine.py:reward", "def reward(answer) return", "cannot be loaded: SyntaxError"),
        ("./mine.py:reward", "import absent_module", "cannot be loaded: ModuleNotFoundError: .*absent_module"),
        ("./mine.py:reward", "async def reward(answer): ...", "is not a plain function"),
        ("./mine.py:reward", "def reward(question): ...", "asks for question; a reward may ask"),
        ("./mine.py:reward", "reward = 3", "is not a plain function"),
    ],
)
def test_a_wrong_reward_is_refused_at_start(
    context: EnvironmentContext, tmp_path: Path, use: str, content: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        started(context, use)
    assert caught.value.origin == f"[environment] reward = {use!r}"
    assert caught.value.fix


def test_a_vocabulary_that_lacks_a_symbol_is_refused_at_start(character_model, tmp_path: Path) -> None:
    model = character_model("0123456789abcdefghijklmnopqrstuvwxy=")
    with pytest.raises(ConfigError, match="vocabulary lacks 'z'"):
        started(EnvironmentContext(model_path=str(model), seed=0, directory=str(tmp_path)))


def test_a_template_reaches_into_maps_and_names_a_missing_field() -> None:
    fields = {"question": "1 + 2?", "metadata": {"expression": "1 + 2"}}
    assert render("{metadata[expression]}=", fields, setting="prompt", origin="x") == "1 + 2="
    assert render("{{{question}}}", fields, setting="prompt", origin="x") == "{1 + 2?}"
    for template, needed in [("{text}", "'text'"), ("{metadata[sum]}", "'sum'"), ("{}", "index")]:
        with pytest.raises(ConfigError, match=f"needs .*{needed}.* it has question, metadata, metadata.expression"):
            render(template, fields, setting="prompt", origin="x")
    with pytest.raises(ConfigError, match="is not a template"):
        render("{question", fields, setting="prompt", origin="x")
