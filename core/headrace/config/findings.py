"""What is wrong with a job: errors that refuse it and warnings about settings that do nothing.

Invariant: all findings are reported together; one mistake never hides another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.errors import ConfigError, HeadraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One remark about a job. The error's class says who must act."""

    severity: Literal["error", "warning"]
    error: HeadraceError

    def __str__(self) -> str:
        title = type(self.error).__name__ if self.severity == "error" else "Warning"
        return f"{title}: {self.error}"


class JobErrors(ConfigError):
    """Several problems of one job, each with its own class, origin and fix."""

    def __init__(self, errors: Sequence[HeadraceError]) -> None:
        super().__init__("\n".join(f"{type(error).__name__}: {error}" for error in errors))
        self.errors = tuple(errors)


def raise_errors(errors: Sequence[HeadraceError]) -> None:
    """Raise what there is: nothing, the one error itself, or :class:`JobErrors`. Repetitions are dropped."""
    different = list({str(error): error for error in errors}.values())
    if len(different) == 1:
        raise different[0]
    if different:
        raise JobErrors(different)
