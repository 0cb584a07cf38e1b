"""How a plugin says what an interpreter must have for it, and with which model it can show that it works."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A virtual environment in which a plugin can live, as ``headrace env create`` makes it: what is named here, and
    headrace and the plugin's own distribution as they are where the command is given."""

    lock: str = ""
    """Path of a requirements file, part of the plugin's package: every distribution that there is to be, what headrace
    needs included, each in the version that was tested. Nothing else is installed."""
    requirements: tuple[str, ...] = ()
    """Instead of a lock: as pip takes them. What these, headrace and the plugin need is installed too."""
    distributions: tuple[str, ...] = ()
    """Whose versions tell which engine an interpreter has; those of them that are there are shown."""
    python: str = ""
    """Versions of Python that this was tested with, such as ``==3.11.*``; empty: all that headrace knows."""
    any_python: bool = False
    """Install what is named whatever Python its own distribution asks for: it was tested with ``python``."""
    note: str = ""
    """What a person should know beforehand, such as where wheels are that the package index does not have."""

    def __post_init__(self) -> None:
        if bool(self.lock) == bool(self.requirements):
            raise ValueError("a setup has either a lock or requirements")


class TinyModels(ABC):
    """Capability of an engine that knows no model but its own. Others are tried with a small Llama in Hugging Face's
    format, of 2 layers with 4 heads of 32 numbers."""

    @classmethod
    @abstractmethod
    def write_tiny_model(cls, path: str) -> None:
        """Write a model that loads within a second into the directory ``path``, which is there: ``headrace doctor``
        starts the engine with it. May import the engine."""
