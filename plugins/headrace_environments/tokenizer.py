"""Text to token ids and back, from the tokenizer files of a Hugging Face directory.

Invariant: nothing is lost on the way in. A character that the vocabulary cannot spell is an error that names it,
never a dropped or unknown token; and nothing is hidden on the way out: special tokens inside an answer decode to
their own text, so that an answer holding one equals no expected text.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.contract import Array
from headrace.errors import ConfigError, HeadraceError, PluginError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

NO_TOKEN = "\ufffd"
"""Stands in an answer for an id without a token: models often have more ids than their tokenizer."""


class TextTokenizer:
    """A ``tokenizers`` tokenizer with the special tokens a policy needs: what starts a prompt, what ends an answer."""

    def __init__(
        self, tokenizer: Tokenizer, *, prefix: Sequence[int], eos: int, stops: Sequence[int], origin: str
    ) -> None:
        """``origin``: where the vocabulary comes from, for errors."""
        self._tokenizer = tokenizer
        self._origin = origin
        self._prefix = list(prefix)
        self.eos = eos
        """Ends an answer that is to be imitated."""
        self.stops = tuple(sorted({eos, *stops}))
        """Any of these ends a sampled answer."""

    @classmethod
    def load(cls, model_path: str, *, origin: str = "") -> TextTokenizer:
        """Read ``tokenizer.json`` and its neighbours. ``origin``: put before their paths in errors. ConfigError when
        one is missing or says too little."""
        try:
            return cls._load(Path(model_path), origin=f"{origin}tokenizer.json")
        except HeadraceError as error:
            error.origin = f"{origin}{error.origin}"
            raise

    @classmethod
    def of_characters(cls, characters: Iterable[str], *, begins: int, origin: str) -> TextTokenizer:
        """One token per character, after one that ends and, so many times, begins. ``origin``: where the characters
        were listed."""
        package = _package()
        words = {token: number for number, token in enumerate(["", *sorted(characters)])}
        tokenizer = package.Tokenizer(package.models.WordLevel(words))
        tokenizer.pre_tokenizer = package.pre_tokenizers.Split(package.Regex(r"[\s\S]"), behavior="isolated")
        tokenizer.decoder = package.decoders.Fuse()
        return cls(tokenizer, prefix=[0] * begins, eos=0, stops=(), origin=origin)

    @classmethod
    def _load(cls, folder: Path, *, origin: str) -> TextTokenizer:
        tokenizer = _read_tokenizer(folder / "tokenizer.json")
        settings = read_settings(folder)
        generation = {**_read_json(folder / "config.json"), **_read_json(folder / "generation_config.json")}
        stops = _ids(generation.get("eos_token_id"))
        eos = _token_id(tokenizer, settings.get("eos_token"))
        if eos is None and not stops:
            raise ConfigError(
                "the model has no end-of-sequence token, so no answer could ever end",
                origin=str(folder),
                fix='name one: "eos_token" in tokenizer_config.json or "eos_token_id" in generation_config.json',
            )
        prefix = _prefix(tokenizer, settings)
        return cls(tokenizer, prefix=prefix, eos=stops[0] if eos is None else eos, stops=stops, origin=origin)

    def prompt(self, text: str, *, whole: bool = False) -> Array:
        """Prompt ids, int32 [P], P >= 1: what the tokenizer puts before a text (a BOS token, if any), then the text.
        ``whole``: the text has that already, as chat templates write it.

        ConfigError names characters that the vocabulary lacks."""
        ids = self._encode(text) if whole else self._prefix + self._encode(text)
        if not ids:
            raise ConfigError("a prompt has no tokens", origin=repr(text), fix="give every task a prompt with text")
        return np.array(ids, dtype=np.int32)

    def answer(self, text: str) -> Array:
        """Answer ids with the end-of-sequence token, int32 [A], A >= 1. ConfigError as in :meth:`prompt`."""
        return np.array([*self._encode(text), self.eos], dtype=np.int32)

    def decode(self, ids: Array) -> str:
        """The text of sampled ids, without the stop token that ended them."""
        tokens = [int(i) for i in ids]
        if tokens and tokens[-1] in self.stops:
            tokens.pop()
        parts: list[list[int]] = [[]]
        for token in tokens:
            if self._tokenizer.id_to_token(token) is None:
                parts.append([])
            else:
                parts[-1].append(token)
        return NO_TOKEN.join(self._tokenizer.decode(part, skip_special_tokens=False) for part in parts)

    def check(self, texts: Iterable[str], *, origin: str) -> None:
        """ConfigError when some text cannot be spelt, or does not come back from its tokens as it was. ``origin``:
        where the texts come from."""
        origin = f"{self._origin}, for {origin}"
        for text in texts:
            try:
                ids = self._encode(text)
            except ConfigError as error:
                raise ConfigError(error.message, origin=origin, fix=error.fix) from None
            back = self._tokenizer.decode(ids, skip_special_tokens=False)
            if back.strip() != text.strip():
                raise ConfigError(
                    f"the tokenizer turns {text!r} into {back!r}; a policy could never give that answer",
                    origin=origin,
                    fix="use a tokenizer whose decoder gives its text back, or write the answers in the form it gives",
                )

    def _encode(self, text: str) -> list[int]:
        ids, missing = _spell(self._tokenizer, text)
        if missing:
            raise ConfigError(
                f"the vocabulary lacks {', '.join(repr(shorten(m)) for m in missing)}, needed for {shorten(text)!r}",
                origin=self._origin,
                fix="add the characters to the alphabet of [model.scratch], choose a model that knows them, or "
                "change the prompt or answer template",
            )
        return ids


def _spell(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[str]]:
    """Ids of ``text``, and the characters (or the words, where each character is known) that no token stands for."""
    try:
        encoding = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # tokenizers raises plain Exception: a vocabulary without an unknown token refuses
        alone = [c for c in sorted(set(text)) if len(text) > 1 and _spell(tokenizer, c)[1]]
        if not alone and len(text) > 1 and "UNK" not in str(error):
            raise ConfigError(f"the tokenizer cannot encode {shorten(text)!r}: {error}") from error
        return [], alone or [text]
    unknown = _unknown_id(tokenizer)
    pieces = [text[slice(*o)] for i, o in zip(encoding.ids, encoding.offsets, strict=True) if i == unknown]
    if not pieces:
        pieces = _dropped(tokenizer, text, encoding)
    if len(text) > 1:
        pieces = [part for piece in pieces for part in _unknown_characters(tokenizer, piece) or [piece]]
    return list(encoding.ids), sorted(set(pieces))


def _dropped(tokenizer: Tokenizer, text: str, encoding: Encoding) -> list[str]:
    """What has no token at all. A tokenizer of words keeps blanks as boundaries: they have none and still come back."""
    covered = np.zeros(len(text), dtype=bool)
    for start, stop in encoding.offsets:
        covered[start:stop] = True
    lost = [text[i] for i in np.flatnonzero(~covered)]
    if not lost or (all(map(str.isspace, lost)) and tokenizer.decode(encoding.ids) == text):
        return []
    # Where characters were dropped, offsets count without them: the characters are asked one by one.
    return (_unknown_characters(tokenizer, text) if len(text) > 1 else []) or lost


def _unknown_characters(tokenizer: Tokenizer, piece: str) -> list[str]:
    return [c for c in sorted(set(piece)) if _spell(tokenizer, c)[1]]


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    token = getattr(tokenizer.model, "unk_token", None)
    if token is not None:
        return tokenizer.token_to_id(token)
    unk_id = getattr(tokenizer.model, "unk_id", None)
    return int(unk_id) if unk_id is not None else None


def _prefix(tokenizer: Tokenizer, settings: dict[str, Any]) -> list[int]:
    """The special tokens that this tokenizer itself puts before a text."""
    words = (token for token in tokenizer.get_vocab(with_added_tokens=False) if token.isalnum())
    probe = min(words, key=lambda word: (len(word), word), default="")
    encoding = tokenizer.encode(probe, add_special_tokens=True)
    leading = []
    for token, special in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
        if not special:
            break
        leading.append(token)
    if leading and len(leading) < len(encoding.ids):
        return leading
    bos = _token_id(tokenizer, settings.get("bos_token"))
    return [bos] if settings.get("add_bos_token") and bos is not None else []


def _package() -> ModuleType:
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise PluginError(
            "text environments need the tokenizers package", fix='pip install "headrace[environments]"'
        ) from error


def _read_tokenizer(path: Path) -> Tokenizer:
    tokenizers = _package()
    if not path.is_file():
        raise ConfigError(
            f"the model directory has no {path.name}",
            origin=str(path.parent),
            fix="point [model] path at a Hugging Face directory with tokenizer files, or use [model.scratch]",
        )
    try:
        tokenizer: Tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception for a malformed file
        raise ConfigError(
            f"the tokenizer file cannot be read: {error}", origin=str(path), fix="save the tokenizer again"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_settings(folder: Path) -> dict[str, Any]:
    """What a model's folder says about its tokenizer: special tokens, chat template. ConfigError for invalid JSON."""
    return {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}


def token_text(token: object) -> str | None:
    """A special token as Hugging Face files name it: text, or a table with its ``content``."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"not valid JSON: {error}", origin=str(path), fix="save the model again") from error
    return content if isinstance(content, dict) else {}


def _token_id(tokenizer: Tokenizer, token: object) -> int | None:
    text = token_text(token)
    return None if text is None else tokenizer.token_to_id(text)


def _ids(value: object) -> list[int]:
    """``eos_token_id`` is absent, one id, or a list of ids."""
    if value is None:
        return []
    return [int(i) for i in value] if isinstance(value, list) else [int(str(value))]


def shorten(text: str, limit: int = 60) -> str:
    """``text``, or how it begins."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
