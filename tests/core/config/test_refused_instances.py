"""More instances than an engine, as it is set, can have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[2] / "small_plugins.py"
COUPLE = f"rollout.use={PLUGINS}:Couple"

ErrorsOf = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("key", "change"),
    [("rollout.instances", "rollout.instances=3"), ("rollout.autoscale.max", "rollout.autoscale={max=3}")],
)
def test_an_engine_has_no_more_instances_than_it_can_have(errors_of: ErrorsOf, key: str, change: str) -> None:
    (error,) = errors_of(overrides=[COUPLE, change])
    assert f"3 instances are asked for; of inference engine '{PLUGINS}:Couple', as it is set, there can be 2" in error
    assert f"--set {change.partition('=')[0]}" in error
    assert f"set {key} to 2 at most" in error


def test_as_many_instances_as_there_can_be_are_no_mistake(errors_of: ErrorsOf) -> None:
    assert errors_of(overrides=[COUPLE, "rollout.instances=2", "rollout.autoscale={max=2}"]) == []
    assert errors_of(overrides=["rollout.instances=64"]) == []
