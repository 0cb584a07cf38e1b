"""A model's own chat template: the text that a question becomes when an assistant is to answer it.

Templates are Jinja programs that come with a model, from whoever made it: they run in Jinja's sandbox, with what
transformers gives them but the clock, so that a prompt is the same on every day.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ConfigError, PluginError
from headrace_environments.tokenizer import read_settings, token_text

if TYPE_CHECKING:
    from jinja2 import Template

FILE = "chat_template.jinja"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """Of environments that can ask a model which was trained to chat."""

    chat: bool = False
    """Put each prompt to the model as a user's message, through its own chat template."""
    system: str | None = None
    """A system message before it. Absent: what the template itself says."""

    def __post_init__(self) -> None:
        if self.system is not None and not self.chat:
            raise ValueError("system is a message of a chat; set chat = true as well, or put it into prompt")


class ChatTemplate:
    """A question, after the system message if there is one, up to where the assistant's answer starts."""

    def __init__(self, source: str, *, system: str | None, tokens: dict[str, str], origin: str) -> None:
        """``tokens``: the text of special tokens that templates use, such as ``bos_token``. ConfigError when
        ``source`` is not a template."""
        self._system = system
        self._tokens = tokens
        self._origin = origin
        self._template = _compile(source, origin)

    @classmethod
    def load(cls, model_path: str, *, system: str | None, origin: str = "") -> ChatTemplate:
        """Read the template of a Hugging Face directory. ``system``: None leaves the message to the template.
        ``origin``: where it was asked for, for errors. ConfigError when there is no template."""
        folder, origin = Path(model_path), f"{origin}, for {model_path}" if origin else model_path
        settings = read_settings(folder)
        source = _source(folder, settings.get("chat_template"))
        if source is None:
            raise ConfigError(
                "chat = true, and the model has no chat template",
                origin=origin,
                fix=f"use a model that was trained to chat, add {FILE} to its folder, or remove chat",
            )
        named = {name: token_text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        tokens = {name: text for name, text in named.items() if text is not None}
        return cls(source, system=system, tokens=tokens, origin=origin)

    def render(self, question: str) -> str:
        """The whole prompt, special tokens included; a tokenizer must add none. ConfigError when the template
        refuses, for example a system message."""
        from jinja2 import TemplateError

        messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        messages.append({"role": "user", "content": question})
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._tokens)
        except (TemplateError, TypeError) as error:
            raise ConfigError(
                f"the chat template fails: {error}",
                origin=self._origin,
                fix="remove system if the model knows none, or correct the template",
            ) from error


def _source(folder: Path, inline: object) -> str | None:
    """A file of its own wins over what ``tokenizer_config.json`` holds: one template, or a list of named ones."""
    file = folder / FILE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if isinstance(inline, list):
        inline = next((entry["template"] for entry in inline if entry["name"] == "default"), None)
    return inline if isinstance(inline, str) else None


def _compile(source: str, origin: str) -> Template:
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise PluginError(
            "chat templates need the jinja2 package", fix='pip install "headrace[environments]"'
        ) from error

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(
            f"the chat template is not one: {error}", origin=origin, fix="save the model's tokenizer again"
        ) from error


def _to_json(value: Any, indent: int | None = None) -> str:
    """Jinja's own filter would escape what HTML escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
