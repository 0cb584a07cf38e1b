"""Engines by name, and what their plugins say of the interpreter that they need."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.contract import Setup
from headrace.errors import PluginError
from headrace.registry import Listed, listing, load
from headrace.validation import near_miss

ROLES = ("inference_engine", "training_engine")


def engines() -> Iterator[Listed]:
    """The installed ones, those that generate first."""
    for role in ROLES:
        yield from listing(role)


def engine_named(name: str) -> tuple[Listed, Setup | None]:
    """The engine of this name that says how it is set up, or else any. PluginError without one."""
    found = [each for each in engines() if each.name == name]
    if not found:
        names = sorted({each.name for each in engines()})
        meant = near_miss(name, names)
        raise PluginError(
            f"no engine named {name!r}; installed: {', '.join(names) or 'none'}"
            + (f". Did you mean {meant!r}?" if meant else ""),
            fix="list candidates with: headrace plugins",
        )
    setups = [(each, load(each.role, each.name).setup()) for each in found]
    return next((pair for pair in setups if pair[1] is not None), setups[0])
