"""The files of a state that several ranks have written into one directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from headrace.errors import RunError
from headrace_torch.trainer.resume import FIX, MANIFEST


def sizes(directory: Path) -> dict[str, int]:
    """Bytes of each file but the manifest, which keeps them."""
    files = sorted(file for file in directory.iterdir() if file.name != MANIFEST)
    return {file.name: os.path.getsize(file) for file in files}


def require_files(path: str, expected: Mapping[str, int]) -> None:
    """RunError unless these files are there, and no shorter or longer than they were."""
    found = sizes(Path(path))
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            there = "is missing" if name not in found else f"has {found[name]} bytes, expected {expected.get(name, 0)}"
            raise RunError(f"{name} {there}", origin=path, fix=FIX)
