"""What a person meets whose job is refused: files to be wrong about, and the errors that are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.contract import CONTRACT_VERSION
from support.chat_model import write_chat_model

SCREEN, WIDTH = 24, 100
"""Lines, and characters of a line."""

FILES = {
    "mine.py": "def reward(answer):\n    return 1\n",
    "broken.py": "def reward(answer) return 1\n",
    "empty.jsonl": "",
    "torn.jsonl": '{"q": "1", "a": "2"}\n{"q": \n',
    "rows.jsonl": '{"q": "1", "a": "2"}\n',
    "old.py": "from headrace.hooks import Observer, hookimpl\nclass Old(Observer):\n"
    f"    contract_version = {CONTRACT_VERSION + 1}\n    @hookimpl\n    def event(self, event): ...\n",
    "plain.py": "class Thing:\n    pass\n\ndef function():\n    pass\n",
    "leaves.py": "raise SystemExit(3)\n",
    "mute/python": "#!/bin/sh\n",
    "unmodelled/config.json": "{",
    "bare/python": "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'headrace'\" >&2\nexit 1\n",
}


def write_files(folder: Path) -> None:
    """Everything in ``FILES``, and two models: one that cannot be read and one that can chat."""
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    for name in ("bare/python", "mute/python"):
        (folder / name).chmod(0o755)
    write_chat_model(folder / "model", max_position_embeddings=64)


def refused(job: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What is printed for a job that ``check`` and ``run`` refuse, without a trace of it."""
    commands = ["run"] if "--run-dir" in options else ["check", "run"]
    said = {_refused(job, capsys, command, *options) for command in commands}
    assert len(said) == 1, "check and run say the same"
    return said.pop()


def _refused(job: Path, capsys: pytest.CaptureFixture[str], *command: str) -> str:
    before = _present(job.parent)
    assert main([command[0], str(job), *command[1:]]) == 2
    assert _present(job.parent) == before, "nothing was started"
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    assert sum(1 + len(line) // WIDTH for line in printed.err.splitlines()) <= SCREEN
    return printed.err[printed.err.index("Error: ") :]  # warnings come first


def teaches(text: str, place: str, allowed: str, fix: str) -> None:
    """One error that says what is allowed, where the mistake is, and what to do."""
    assert [len(re.findall(part, text, re.M)) for part in ("^[A-Za-z]*Error: ", "^  from: ", "^  fix:  ")] == [1, 1, 1]
    message, _, rest = text.partition("\n  from: ")
    origin, _, advice = rest.partition("\n  fix:  ")
    assert allowed in message
    assert place in origin
    assert fix in advice


def _present(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}
