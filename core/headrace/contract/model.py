"""What is known of a job's model before it is loaded or made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """For checks that must not load a model. What is None is not known."""

    origin: str
    """Where the job says what the model can read and write, for errors."""
    path: str | None = None
    """A Hugging Face-format directory; None: the model is made at start."""
    max_length: int | None = None
    """Tokens of the longest sequence, prompt and answer together."""
    characters: frozenset[str] | None = None
    """All that it can read and write, where it does so character by character."""
    begins: int = 0
    """Tokens that are put before a text of such characters."""
