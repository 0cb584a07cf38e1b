"""The suites themselves are right: a fake that breaks one rule fails the test of that rule and no other.

Every file of ``broken`` holds, for one suite, a class per rule; ``breaks`` names the rule's test.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from headrace.testing import suites

pytest_plugins = ["pytester"]

BROKEN = Path(__file__).parent / "broken"
SUITES = sorted(path.stem for path in BROKEN.glob("*.py"))


def rules_of(suite: str) -> set[str]:
    """The tests of the suite that lives in this module of :mod:`headrace.testing.suites`, less those of the suites that
    it contains."""
    all_of_them = {cls for _, cls in inspect.getmembers(suites, inspect.isclass) if cls.__name__.endswith("Contract")}
    (contract,) = (cls for cls in all_of_them if cls.__module__ == f"{suites.__name__}.{suite}")
    contained = all_of_them & set(contract.__mro__[1:])
    return proofs_of(contract).difference(*map(proofs_of, contained))


def proofs_of(contract: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(contract, inspect.isfunction) if name.startswith("test_")}


@pytest.mark.parametrize("suite", SUITES)
def test_every_rule_has_a_broken_fake_that_fails_its_test_and_no_other(suite: str, pytester: pytest.Pytester) -> None:
    options = ("-p", "no:randomly", "-p", "no:cacheprovider", "--tb=short", "--maxfail=100")
    run = pytester.inline_run(str(BROKEN / f"{suite}.py"), *options)
    failures, expected = failures_of(run), breaks_of(run)
    assert {name: sorted(found) for name, found in failures.items()} == {n: [r] for n, r in expected.items()}
    assert sorted(rules_of(suite)) == sorted(expected.values())
    unsaid = {name: found for name, rules in failures.items() for found in rules.values() if "rule: " not in found}
    assert unsaid == {}, "a failure that does not state its rule"


def failures_of(run: Any) -> dict[str, dict[str, str]]:
    """Class → test → what it printed, for every test that failed."""
    failures: dict[str, dict[str, str]] = {}
    for report in run.getreports("pytest_runtest_logreport"):
        if report.failed:
            _, cls, test = report.nodeid.split("::")
            failures.setdefault(cls, {})[test] = report.longreprtext
    return failures


def breaks_of(run: Any) -> dict[str, str]:
    """Class → the test it should fail."""
    return {call.item.cls.__name__: call.item.cls.breaks for call in run.getcalls("pytest_itemcollected")}
