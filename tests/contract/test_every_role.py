"""No role without a suite and a fake, and no built-in plugin that the suite of its role has not seen."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from headrace import testing
from headrace.registry import ROLES, load
from headrace.testing import suites

ROOT = Path(__file__).parents[2]
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
FAKES = [getattr(testing, name) for name in testing.__all__ if name.startswith("Fake")]


@pytest.mark.parametrize("role", sorted(ROLES))
def test_a_role_has_one_fake_that_a_job_file_can_name(role: str) -> None:
    (fake,) = (fake for fake in FAKES if issubclass(fake, ROLES[role]))
    assert load(role, f"headrace.testing:{fake.__name__}") is fake


@pytest.mark.parametrize("role", sorted(ROLES))
def test_every_built_in_plugin_of_a_role_passes_its_suite(role: str) -> None:
    """Passing is the matter of the test classes; here they must be there."""
    tested: set[str] = set()
    for path in Path(__file__).parent.glob("test_*_contract.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} & set(suites.__all__):
                tested |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    classes = {target.partition(":")[2].split()[0] for target in GROUPS[f"headrace.{role}"].values()}
    assert classes - tested == set()
