"""Chat templates: a prompt is what transformers makes of it, and ends where the assistant's answer starts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from headrace.contract import EnvironmentContext
from headrace.errors import ConfigError
from headrace_environments.chat import ChatTemplate
from headrace_environments.jsonl import Jsonl, JsonlSettings
from headrace_environments.reasoning_gym import ReasoningGymSettings
from headrace_environments.text import TextEnvironment

SPECIAL = ["<eos>", "<bos>", "<user>", "<assistant>", "<system>"]
TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user'] %}
        {{- raise_exception('who is ' ~ message.role ~ '?') }}
    {%- endif %}
    {{- '<' ~ message.role ~ '>' ~ message.content | trim ~ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}
"""
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages[0].content }}"
)

ModelMaker = Callable[..., Path]


def chat_tokenizer() -> Tokenizer:
    """Bytes, and special tokens; a plain text is begun with BOS, as Llama's tokenizers do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate([*SPECIAL, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    return tokenizer


@pytest.fixture
def chat_model(make_model: ModelMaker) -> Path:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<bos>"},
        "eos_token": "<eos>",
        "chat_template": TEMPLATE,
    }
    return make_model(chat_tokenizer(), settings=settings)


@pytest.fixture
def start(context: EnvironmentContext, chat_model: Path, tmp_path: Path) -> Callable[..., TextEnvironment]:
    """Start an environment of one record, with these settings."""
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "2 < 3?", "answer": "yes"}))

    def make(**settings: Any) -> TextEnvironment:
        environment = Jsonl(JsonlSettings(path="data.jsonl", evaluation_share=0, **settings))
        environment.start(dataclasses.replace(context, model_path=str(chat_model)))
        return environment

    return make


def spelt(path: Path, tokens: np.ndarray) -> str:
    text: str = Tokenizer.from_file(str(path / "tokenizer.json")).decode(tokens.tolist(), skip_special_tokens=False)
    return text


@pytest.mark.parametrize("system", [None, "Be brief.", ""])
async def test_a_prompt_has_the_tokens_that_transformers_gives_it(
    start: Callable[..., TextEnvironment], chat_model: Path, session: Any, system: str | None
) -> None:
    from transformers import AutoTokenizer

    environment, answering = start(chat=True, system=system), session([5, 0])
    await environment.run(environment.task(0, split="train"), answering)
    messages = [] if system is None else [{"role": "system", "content": system}]
    expected = AutoTokenizer.from_pretrained(chat_model).apply_chat_template(
        [*messages, {"role": "user", "content": "2 < 3?"}], add_generation_prompt=True, return_dict=False
    )
    assert answering.prompts[0].tolist() == expected
    assert answering.stops == [(0,)]


async def test_a_prompt_has_one_bos_and_ends_with_the_generation_prompt(
    start: Callable[..., TextEnvironment], chat_model: Path, session: Any
) -> None:
    environment, answering = start(chat=True), session([5, 0])
    await environment.run(environment.task(0, split="train"), answering)
    assert spelt(chat_model, answering.prompts[0]) == "<bos><user>2 < 3?<eos><assistant>"


async def test_the_loss_mask_covers_the_sampled_tokens_with_their_eos_and_nothing_else(
    start: Callable[..., TextEnvironment], chat_model: Path, session: Any
) -> None:
    environment = start(chat=True)
    task = environment.task(0, split="train")
    shown = environment.demonstration(task)
    assert spelt(chat_model, shown.tokens[shown.loss_mask]) == "yes<eos>"
    assert spelt(chat_model, shown.tokens[~shown.loss_mask]) == "<bos><user>2 < 3?<eos><assistant>"
    sampled = shown.tokens[shown.loss_mask].tolist()
    played = await environment.run(task, session(sampled))
    assert (played.tokens.tolist(), played.loss_mask.tolist()) == (shown.tokens.tolist(), shown.loss_mask.tolist())
    assert played.text == "yes"
    assert environment.score(task, played).reward == 1


async def test_without_chat_a_prompt_is_text_as_before(
    start: Callable[..., TextEnvironment], chat_model: Path, session: Any
) -> None:
    environment, answering = start(), session([5, 0])
    await environment.run(environment.task(0, split="train"), answering)
    assert spelt(chat_model, answering.prompts[0]) == "<bos>2 < 3?"


def test_a_template_of_its_own_file_wins_and_a_list_names_its_default(chat_model: Path) -> None:
    def render() -> str:
        return ChatTemplate.load(str(chat_model), system=None).render("hi")

    settings = json.loads((chat_model / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": "tools", "template": "no"}, {"name": "default", "template": "listed"}]
    (chat_model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert render() == "listed"
    (chat_model / "chat_template.jinja").write_text("{{ messages | tojson }}")
    assert render() == '[{"role": "user", "content": "hi"}]'


def test_a_model_without_a_template_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="the model has no chat template") as raised:
        ChatTemplate.load(str(model), system=None)
    assert raised.value.fix is not None
    assert "remove chat" in raised.value.fix


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "the chat template is not one"),
        (NO_SYSTEM, "the chat template fails: no system role"),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails: .*unsafe"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_with_its_reason(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        ChatTemplate(template, system="Be brief.", tokens={}, origin="model").render("hi")
    assert raised.value.fix


def test_a_prompt_does_not_change_with_the_day() -> None:
    template = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}no date{% endif %}"
    assert ChatTemplate(template, system=None, tokens={}, origin="model").render("hi") == "no date"


def test_a_system_message_without_a_chat_is_refused() -> None:
    with pytest.raises(ValueError, match="set chat = true"):
        ReasoningGymSettings(dataset="chain_sum", system="Be brief.")
