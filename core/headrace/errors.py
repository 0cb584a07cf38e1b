"""Every error a user can meet. Each class says who must act.

    HeadraceError
    ├── ConfigError      the person editing the job file
    ├── PluginError      the person installing packages
    ├── ContractError    the plugin's author
    ├── WiringError      the person combining roles (capabilities, transports, resources)
    ├── StalenessError   the person tuning lag, batch and capacity
    ├── EngineError      the operator; wraps what an engine raised
    ├── WireError        the operator; a peer, message or connection is not as it must be
    │   └── DeadlineError    a wait that ran out; names what was awaited
    │       └── SilenceError     nobody answered at all; names who
    └── RunError         the operator; a run that cannot go on, or a run directory that cannot be read
        └── LostRowsError    nobody: the run drops their groups and goes on

An error prints in four parts: what happened and what was expected (the message), where it came from
(``origin``), what to do (``fix``).
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of all errors raised for users. ``origin``: place in a file or node; ``fix``: next step."""

    def __init__(self, message: str, *, origin: str = "", fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.origin = origin
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.message]
        if self.origin:
            lines.append(f"  from: {self.origin}")
        if self.fix:
            lines.append(f"  fix:  {self.fix}")
        return "\n".join(lines)


class ConfigError(HeadraceError):
    """A job file that cannot mean what its author intended."""


class PluginError(HeadraceError):
    """A plugin that is missing, ambiguous, unloadable or built for another contract version."""


class ContractError(HeadraceError):
    """A plugin that breaks its role's contract."""


class WiringError(HeadraceError):
    """Roles that are fine alone and impossible together."""


class StalenessError(HeadraceError):
    """Settings of lag, batch and capacity that must deadlock or overshoot; states the inequality."""


class EngineError(HeadraceError):
    """An engine raised; names node, method and version."""


class WireError(HeadraceError):
    """A message, peer or connection that is refused or lost."""


class DeadlineError(WireError):
    """A wait that ran past its deadline; names what was awaited."""


class SilenceError(DeadlineError):
    """A peer that did not answer, though it was told until when; names it."""


class RunError(HeadraceError):
    """A run that cannot go on, or a run directory that cannot be used."""


class LostRowsError(RunError):
    """Rows that a storage unit had and has no more, because it was lost and another took its place."""
