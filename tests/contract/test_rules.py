"""How a suite speaks: a broken rule is a sentence with what was seen, and a missing fixture says what to write."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from headrace.errors import RunError
from headrace.testing.suites import RuleBrokenError
from headrace.testing.suites.rules import check, raises, rule

pytest_plugins = ["pytester"]

SENTENCE = "Water flows down."
BROKEN = re.escape(f"rule: {SENTENCE}\n  seen: ")


def broken(test: Callable[[], object], seen: str) -> None:
    with pytest.raises(RuleBrokenError, match=BROKEN + seen):
        rule(SENTENCE)(test)()


def test_a_check_that_does_not_hold_breaks_the_rule_with_what_was_seen() -> None:
    broken(lambda: check(False, "it flows up"), "it flows up")


def test_whatever_a_plugin_raises_breaks_the_rule_that_it_interrupts() -> None:
    async def late() -> None:
        raise ZeroDivisionError("no water")

    broken(lambda: {}["river"], "KeyError: 'river'")
    broken(late, "ZeroDivisionError: no water")


def test_a_skip_is_no_broken_rule() -> None:
    with pytest.raises(pytest.skip.Exception, match="no river"):
        rule(SENTENCE)(lambda: pytest.skip("no river"))()


def test_an_error_that_is_expected_must_be_raised_and_name_what_it_is_about() -> None:
    def refuse() -> None:
        raise RunError("the sluice is shut")

    rule(SENTENCE)(lambda: raises(RunError, refuse, naming=("sluice",)))()
    broken(lambda: raises(RunError, refuse, naming=("weir",)), "a RunError that does not name weir: the sluice is shut")
    broken(lambda: raises(RunError, lambda: 7), "no RunError, but the answer 7")


def test_a_fixture_that_an_author_must_write_says_so(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "from headrace.testing.suites import StorageContract\nclass TestMine(StorageContract): pass",
    )
    run = pytester.inline_run("-p", "no:asyncio", "-p", "no:randomly", "-p", "no:cacheprovider", "--maxfail=1")
    (error, *_) = [report for report in run.getreports("pytest_runtest_logreport") if report.failed]
    assert "override the fixture `plugin` in your subclass: an empty storage" in error.longreprtext
