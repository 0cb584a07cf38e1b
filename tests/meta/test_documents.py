"""Documents cannot drift: their code runs, their job files pass the checks, their commands exist.

A Python block whose first line is ``# name.py`` is saved under that name, for the blocks after it. A TOML block is
laid over the demo job and checked, unless its first line names another file. One that begins with ``# from FILE``
quotes that file, and is there word for word.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import command_parser
from headrace.config import check_job, dumps, load_job
from support.chat_model import write_chat_model

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/algorithms.md",
    "docs/data_plane.md",
    "docs/fsdp.md",
    "docs/lora.md",
    "docs/megatron.md",
    "docs/quantization.md",
    "docs/sglang.md",
    "docs/simulator.md",
    "docs/vllm.md",
    "docs/weights.md",
)
DEMO = ROOT / "examples" / "sort_symbols" / "job.toml"
PHASE_TABLES = ("algorithm", "batch", "staleness", "trainer")
CORE_KEYS = {"instances", "max_new_tokens", "temperature", "workers", "scoring_workers", "threads", "concurrency"}
EXAMPLE_JOBS = [
    path for path in sorted(ROOT.glob("examples/**/*.toml")) if not (path.parent / "pyproject.toml").exists()
]
"""The job of an example that is a distribution of its own is checked where that is installed."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OVERRIDING = re.compile(r"headrace run JOB(?: --set [^\s`]+)+")
QUOTED = re.compile(r"# from (\S+)\n")
NAMED = re.compile(r"# ([\w.]+\.\w+)\n")


def blocks(document: str, *languages: str) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks in these languages, in order."""
    found: list[tuple[str, str]] = BLOCK.findall((ROOT / document).read_text())
    return [(language, text) for language, text in found if language in languages]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a reader would try things out: beside the examples, with the data set that a document supposes."""
    for example in (ROOT / "examples").iterdir():
        (tmp_path / example.name).symlink_to(example)
    folder = tmp_path / "mine"
    folder.mkdir()
    problems = [{"question": f"{n}+{n}", "solution": str(2 * n)} for n in range(100)]
    (folder / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
    return folder


@pytest.mark.parametrize("document", DOCUMENTS)
def test_code_and_job_files_of_a_document_run(document: str, folder: Path) -> None:
    for language, text in blocks(document, "python", "toml", "json"):
        named = NAMED.match(text)
        if named and language != "toml":
            (folder / named.group(1)).write_text(text.removeprefix(named.group()) if language == "json" else text)
        if quoted := QUOTED.match(text):
            assert text.removeprefix(quoted.group()) in (ROOT / quoted.group(1)).read_text(), text
        elif language == "python":
            run_python(text, folder)
        elif language == "toml" and named:
            tomllib.loads(text)
        elif language == "toml":
            check_fragment(text, folder)


def run_python(text: str, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, f"{text}\n{done.stderr}"


def check_fragment(text: str, folder: Path) -> None:
    """Lay a fragment over the demo job, and its phase tables over the demo's last phase."""
    job: dict[str, Any] = tomllib.loads(DEMO.read_text())
    fragment = tomllib.loads(text)
    for name, value in fragment.items():
        job[name] = overlaid(job.get(name), value)
    if "phase" not in fragment:
        last = job["phase"][-1]
        last.update({name: overlaid(last.get(name), fragment[name]) for name in PHASE_TABLES if name in fragment})
    path = folder / "fragment.toml"
    path.write_text(dumps(job))
    errors = [str(finding) for finding in check_job(load_job(path)) if finding.severity == "error"]
    assert errors == [], text


def overlaid(kept: Any, value: Any) -> Any:
    """``value``'s keys over ``kept``'s; of another plugin's table only core's own keys stay."""
    if not isinstance(kept, dict) or not isinstance(value, dict):
        return value
    if "use" in value and value["use"] != kept.get("use"):
        kept = {key: kept[key] for key in CORE_KEYS & set(kept)}
    return {**kept, **value}


def test_the_table_of_capabilities_is_what_engines_declare() -> None:
    script = ROOT / ".ci" / "capability_table.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_of_a_document_exist(document: str) -> None:
    for _, text in blocks(document, "sh", "console"):
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0].endswith("headrace"):
                command_parser().parse_args(words[1:])
            if words and words[0] == "make":
                assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(), line


@pytest.mark.parametrize("document", DOCUMENTS)
def test_overrides_that_a_document_shows_work_on_the_demo_job(document: str) -> None:
    for command in OVERRIDING.findall((ROOT / document).read_text()):
        overrides = command_parser().parse_args(shlex.split(command)[1:]).overrides
        assert [str(finding) for finding in check_job(load_job(DEMO, overrides))] == [], command


@pytest.mark.parametrize("path", EXAMPLE_JOBS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_job_passes_the_checks(path: Path, tmp_path: Path) -> None:
    write_chat_model(tmp_path)  # stands for a pretrained model that a job names
    pretrained = "path" in tomllib.loads(path.read_text()).get("model", {})
    job = load_job(path, [f"model.path={tmp_path}"] if pretrained else [])
    assert [str(finding) for finding in check_job(job)] == []


def test_the_table_of_recipes_has_each_under_the_name_of_its_job() -> None:
    folder = ROOT / "examples" / "recipes"
    recipes, table = sorted(folder.glob("*.toml")), (folder / "README.md").read_text()
    assert [recipe.name for recipe in recipes if f"\n| [{recipe.stem}]({recipe.name}) |" not in table] == []
    assert [load_job(recipe).job.name for recipe in recipes] == [recipe.stem.replace("_", "-") for recipe in recipes]
