"""Whatever an outsider can extend is tested: plugins by class, hooks by name, roles in the guide."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path

import pytest

from headrace.hooks import ObserverHooks
from headrace.registry import ROLES

ROOT = Path(__file__).parents[2]
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
ENTRY_POINTS = [(group.removeprefix("headrace."), target) for group in GROUPS for target in GROUPS[group].values()]
HOOKS = [name for name, _ in inspect.getmembers(ObserverHooks, inspect.isfunction)]
TESTS = "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def test_every_group_is_a_role() -> None:
    ours = {group for group in GROUPS if group.startswith("headrace.")}
    assert {group.removeprefix("headrace.") for group in ours} == set(ROLES)


@pytest.mark.parametrize(("role", "target"), ENTRY_POINTS)
def test_every_entry_point_has_a_test_of_its_class(role: str, target: str) -> None:
    name = target.partition(":")[2].split()[0]
    assert re.search(rf"\b{name}\b", TESTS), f"no test names {role} {name}"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_test_named_after_it(hook: str) -> None:
    assert re.search(rf"def test_\w*{hook}\w*\(", TESTS), f"no test is named after {hook}"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_stands_in_the_guide_with_its_signature(hook: str) -> None:
    parameters = [name for name in inspect.signature(getattr(ObserverHooks, hook)).parameters if name != "self"]
    assert f"`{hook}({', '.join(parameters)})`" in GUIDE


@pytest.mark.parametrize("role", sorted(ROLES))
def test_every_role_stands_in_the_guide(role: str) -> None:
    assert f"`{role}`" in GUIDE


def test_an_algorithm_takes_one_file_of_under_60_lines_and_one_entry_point() -> None:
    """That of the example, which its own job runs, and that of the guide, which runs as it stands."""
    example = ROOT / "examples" / "outside_plugin"
    offered = tomllib.loads((example / "pyproject.toml").read_text())["project"]["entry-points"]["headrace.algorithm"]
    (target,) = offered.values()
    module = target.partition(":")[0].replace(".", "/")
    (guide,) = re.findall(r"^```python\n(# mean_baseline\.py\n.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
    for text in ((example / "src" / f"{module}.py").read_text(), guide):
        assert len(text.splitlines()) < 60
