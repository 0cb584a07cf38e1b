"""The house rules that need no run: packages, import rules, sizes, what an import brings along."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCE_ROOTS = PROJECT["tool"]["hatch"]["build"]["dev-mode-dirs"]
PACKAGES = sorted(path.relative_to(ROOT) for root in SOURCE_ROOTS for path in (ROOT / root).glob("headrace*"))
MODULES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
FILES = sorted([*MODULES, *(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))])
CONTRACTS = {contract["name"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}
HEAVY = ("torch", "transformers", "ray", "vllm", "sglang", "megatron")


def test_every_package_folder_is_in_the_wheel() -> None:
    assert sorted(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == sorted(map(str, PACKAGES))


def test_every_package_folder_is_under_the_import_rules() -> None:
    names = [package.name for package in PACKAGES]
    assert PROJECT["tool"]["importlinter"]["root_packages"] == sorted(names)
    outside = sorted(set(names) - {"headrace"})
    assert CONTRACTS["adapters and plugins are blind to each other"]["modules"] == outside
    assert CONTRACTS["outside core, most of its rooms are unknown"]["source_modules"] == outside
    assert set(outside) <= set(CONTRACTS["core knows no plugin and no engine"]["forbidden_modules"])


def test_every_room_of_core_is_hidden_from_plugins_or_open_on_purpose() -> None:
    open_rooms = {"balance", "contract", "errors", "hooks", "process", "testing", "wire"}
    core = ROOT / "core" / "headrace"
    rooms = {path.stem for path in core.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    hidden = {
        name.removeprefix("headrace.")
        for name in CONTRACTS["outside core, most of its rooms are unknown"]["forbidden_modules"]
    }
    assert hidden == rooms - open_rooms - {"__init__"}


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in FILES}
    assert {path: length for path, length in lengths.items() if length > 400} == {}


def test_every_module_says_what_it_is_for() -> None:
    assert [str(path) for path in MODULES if not ast.get_docstring(ast.parse((ROOT / path).read_text()))] == []


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {(ROOT / path).parent for path in MODULES}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_a_suppressed_check_names_its_rule() -> None:
    bare = re.compile(r"# noqa(?!: [A-Z])|type: ignore(?!\[)")
    lines = [(path, line) for path in MODULES for line in (ROOT / path).read_text().splitlines()]
    assert [f"{path}: {line.strip()}" for path, line in lines if bare.search(line)] == []


def test_importing_headrace_brings_no_engine_along() -> None:
    code = f"import sys, headrace, headrace.contract, headrace.cli; print(*sorted(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_selecting_every_plugin_brings_no_engine_along() -> None:
    code = (
        "import sys\nfrom headrace.registry import listing, load\n"
        "for item in listing():\n    load(item.role, item.name)\n"
        f"print(*sorted(set({HEAVY}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.split() == []


def test_the_version_is_the_same_in_the_package_and_its_metadata() -> None:
    import headrace

    assert PROJECT["project"]["version"] == headrace.__version__
