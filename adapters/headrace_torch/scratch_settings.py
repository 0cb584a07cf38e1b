"""The table ``[model.scratch]``: what a fresh model can be made of, judged without torch.

Invariant: a table that :func:`read` accepts is one that :mod:`headrace_torch.scratch` can turn into a model.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from headrace.errors import ConfigError
from headrace_torch.model_config import Architecture

SPECIAL = ("<pad>", "<bos>", "<eos>")
"""Tokens before those of the alphabet."""

Origin = Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchSettings:
    """The table ``[model.scratch]``."""

    architecture: Architecture
    alphabet: str
    """The characters the model can read and write, each once."""
    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    max_length: int
    """Tokens of the longest sequence."""
    kv_heads: int | None = None
    """Key-value heads, shared by groups of heads; default: as many as ``heads``."""
    vocabulary_size: int | None = None
    """Default: what special tokens and alphabet need, rounded up to a multiple of 64."""
    tie_embeddings: bool = True
    """Whether the output head is the embedding."""

    @property
    def tokens(self) -> int:
        """Special tokens and characters."""
        return len(SPECIAL) + len(self.alphabet)

    @property
    def parameters(self) -> int:
        """Of the matrices, which are nearly all of them."""
        size, heads = self.hidden_size, self.heads
        attention = 2 * size * size * (heads + (self.kv_heads or heads)) // heads
        embeddings = (self.vocabulary_size or self.tokens) * size * (1 if self.tie_embeddings else 2)
        return embeddings + self.layers * (attention + 3 * size * self.intermediate_size)


def read(settings: Mapping[str, Any], *, origin: Origin = lambda key: "[model.scratch]") -> ScratchSettings:
    """``settings`` as a table. ConfigError names what is unknown, missing, of another type or impossible;
    ``origin(key)``: where that key was written."""
    fields = {field.name: field for field in dataclasses.fields(ScratchSettings)}
    for name in settings:
        if name not in fields:
            known = f"known: {', '.join(fields)}"
            meant, hint = _near_miss(name, fields)
            fix = f"rename it to {meant}" if meant else "remove it"
            raise ConfigError(f"unknown setting {name!r}; {known}{hint}", origin=origin(name), fix=fix)
    for name, field in fields.items():
        if name in settings:
            _check_type(name, str(field.type), settings[name], origin)
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{name} is missing", origin=origin(name), fix=f"add {name} = ...")
    table = ScratchSettings(**settings)
    _check_architecture(table, origin)
    _check_alphabet(table, origin)
    _check_sizes(table, origin)
    _check_memory(table, origin)
    return table


def _check_type(name: str, annotation: str, value: object, origin: Origin) -> None:
    expected: type = {"bool": bool, "str": str, "Architecture": str}.get(annotation, int)
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is int):
        form = {bool: "true or false", str: 'text: "..."'}.get(expected, "a whole number")
        raise ConfigError(
            f"{name} is {value!r}, expected a value of type {expected.__name__}",
            origin=origin(name),
            fix=f"write {form}",
        )


def _check_architecture(table: ScratchSettings, origin: Origin) -> None:
    known = get_args(Architecture)
    if table.architecture not in known:
        meant, hint = _near_miss(table.architecture, known)
        raise ConfigError(
            f"unknown architecture {table.architecture!r}; known: {', '.join(known)}{hint}",
            origin=origin("architecture"),
            fix=f'set architecture = "{meant or known[0]}"',
        )


def _check_alphabet(table: ScratchSettings, origin: Origin) -> None:
    repeated = sorted({c for c in table.alphabet if table.alphabet.count(c) > 1})
    if repeated or not table.alphabet:
        found = f"repeats {', '.join(map(repr, repeated))}" if repeated else "is empty"
        raise ConfigError(f"alphabet {found}", origin=origin("alphabet"), fix="list every character once")
    if table.vocabulary_size is not None and table.vocabulary_size < table.tokens:
        raise ConfigError(
            f"vocabulary_size is {table.vocabulary_size}; special tokens and alphabet need {table.tokens}",
            origin=origin("vocabulary_size"),
            fix="raise it, or leave it out",
        )


def _check_sizes(table: ScratchSettings, origin: Origin) -> None:
    for name in ("hidden_size", "layers", "heads", "intermediate_size", "max_length", "kv_heads"):
        value = getattr(table, name)
        if value is not None and value < 1:
            raise ConfigError(
                f"{name} is {value}, expected at least 1", origin=origin(name), fix=f"set {name} to 1 or more"
            )
    if table.hidden_size % (2 * table.heads):
        raise ConfigError(
            f"hidden_size {table.hidden_size} is not an even number for each of {table.heads} heads",
            origin=origin("heads"),
            fix=f"make hidden_size a multiple of {2 * table.heads}, or choose another number of heads",
        )
    if table.kv_heads is not None and table.heads % table.kv_heads:
        fits = [str(n) for n in range(1, table.heads + 1) if table.heads % n == 0]
        raise ConfigError(
            f"{table.heads} heads cannot share {table.kv_heads} kv_heads",
            origin=origin("kv_heads"),
            fix=f"let kv_heads divide heads: {', '.join(fits)}",
        )


def _check_memory(table: ScratchSettings, origin: Origin) -> None:
    memory, needed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 4 * table.parameters
    if needed > memory:
        raise ConfigError(
            f"a model of {table.parameters:.1e} parameters takes {needed / 1e9:,.0f} GB for its weights alone, and "
            f"this machine has {memory / 1e9:,.0f} GB",
            origin=origin("hidden_size"),
            fix="lower hidden_size, layers, intermediate_size or vocabulary_size",
        )


def _near_miss(name: str, known: Iterable[str]) -> tuple[str, str]:
    """What ``name`` was probably meant to be, and the sentence that says so; both may be empty."""
    meant = difflib.get_close_matches(name, list(known), n=1)
    return (meant[0], f". Did you mean {meant[0]!r}?") if meant else ("", "")
