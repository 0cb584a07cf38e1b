"""How long property tests look: briefly by default, for hours when ``HEADRACE_HYPOTHESIS=nightly``."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

NIGHTLY = os.environ.get("HEADRACE_HYPOTHESIS") == "nightly"
EVENTS = 2000 if NIGHTLY else 0
"""How many things at least happen in a run whose rules draw stretches of them."""


def machine(*, examples: int, steps: int, **more: Any) -> settings:
    """Of a state machine: ``steps`` rules in each of ``examples`` runs; nightly more, and other ones each time."""
    if NIGHTLY:
        return settings(max_examples=200, stateful_step_count=100, deadline=None, **more)
    return settings(max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True, **more)
