"""A loss's module at ranks above 0: rank 0 may have one that no import finds, such as a file of its own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import suppress


def offer(module: str, file: str) -> None:
    """Make rank 0's ``module`` importable here, where only its file is known."""
    with suppress(ImportError):
        importlib.import_module(module)
        return
    if not file:
        return
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[module] = loaded = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(loaded)
    except BaseException:  # a half-made module must not be found again; raised again
        del sys.modules[module]
        raise
