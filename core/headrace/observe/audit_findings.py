"""What the audit checks, what it found, and how a checker says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

Rule = Literal[
    "log",
    "one_version",
    "interruption",
    "conservation",
    "scored",
    "rewards",
    "staleness",
    "whole_groups",
    "stages",
    "batch",
    "phases",
    "versions",
    "weights",
    "agreement",
    "window",
    "drained",
    "moves",
    "evaluation",
    "resume",
]

RULES: Mapping[Rule, str] = MappingProxyType(
    {
        "log": "no gap, from run_started to run_finished",
        "one_version": "tokens of a trajectory are all of its one version",
        "interruption": "interrupted answers go on under newer live versions",
        "conservation": "nothing is lost, trained twice, or trained unstored",
        "scored": "what is trained is finished, judged and not cut off",
        "rewards": "the trainer read the rewards that were reported",
        "staleness": "trained rows are 0 to max_staleness versions old",
        "whole_groups": "groups are trained and dropped with all members",
        "stages": "what is trained went through each stage once",
        "batch": "batch_groups groups each; what is trained was taken",
        "phases": "a completed run trained what its phases ask for",
        "versions": "one more per applied batch, never otherwise",
        "weights": "generated only with what was committed as published",
        "agreement": "trainer and instances agree on the same tokens",
        "window": "at most max_staleness + 1 versions are in flight",
        "drained": "an instance that leaves has nothing left to do",
        "moves": "moved between instances that serve its version",
        "evaluation": "held-out answers are of the version asked for",
        "resume": "goes on from what was saved, with all that was live",
    }
)
assert tuple(RULES) == get_args(Rule)

KEPT = 1000
"""Violations kept; beyond that they are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule, and the event that shows it."""

    rule: Rule
    message: str
    seq: int


class Findings:
    """Collects what checkers report."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.violated: Counter[Rule] = Counter()
        self.checked: Counter[Rule] = Counter()

    def check(self, holds: bool, rule: Rule, seq: int, message: str, *values: object) -> bool:
        """Count one check of ``rule``; returns ``holds``. ``message`` is formatted with ``values`` only when broken:
        a log has millions of checks."""
        self.checked[rule] += 1
        if not holds:
            self.violated[rule] += 1
            if len(self.violations) < KEPT:
                self.violations.append(Violation(rule=rule, message=message.format(*values), seq=seq))
        return holds
