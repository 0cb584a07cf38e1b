"""Outcomes of runs that were made already, so that a measurement of hours can be continued."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


class Kept(Generic[T]):
    """By name of the run, in a JSON file that is rewritten whole after every one. SystemExit when it holds runs of
    other settings. ``kind``: of the outcomes, of plain values."""

    def __init__(self, file: Path, settings: Mapping[str, Any], kind: type[T]) -> None:
        self._file = file
        self._settings = dict(settings)
        self.outcomes: dict[str, T] = {}
        if file.exists():
            content = json.loads(file.read_text())
            if content["settings"] != self._settings:
                raise SystemExit(f"{file} is of {content['settings']}, not {self._settings}; use another --work")
            self.outcomes = {name: kind(**values) for name, values in content["cells"].items()}

    def add(self, name: str, outcome: T) -> None:
        """Keep it."""
        self.outcomes[name] = outcome
        cells = {name: asdict(outcome) for name, outcome in sorted(self.outcomes.items())}
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps({"settings": self._settings, "cells": cells}, indent=1))
        os.replace(fresh, self._file)
