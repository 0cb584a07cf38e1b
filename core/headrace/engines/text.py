"""Diagnoses for people, and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.engines.doctor import Diagnosis

_WIDTH = 13


def as_text(diagnosis: Diagnosis) -> str:
    """Some lines."""
    phases = f" of {', '.join(diagnosis.phases)}" if diagnosis.phases else ""
    head = f"{diagnosis.use} ({diagnosis.role}{phases}): {_verdict(diagnosis)}"
    return "\n".join([head, *(f"  {name.ljust(_WIDTH)}  {text}" for name, text in _lines(diagnosis))])


def as_plain(diagnosis: Diagnosis) -> dict[str, Any]:
    """What JSON can say."""
    error = diagnosis.error
    return {
        "role": diagnosis.role,
        "use": diagnosis.use,
        "phases": list(diagnosis.phases),
        "interpreter": diagnosis.python,
        "status": diagnosis.status,
        "ok": diagnosis.ok,
        "found": diagnosis.found,
        "error": None if error is None else {"message": error.message, "origin": error.origin, "fix": error.fix},
        "commands": list(diagnosis.commands),
    }


def _verdict(diagnosis: Diagnosis) -> str:
    return {"works": "works", "missing": "is not set up", "fails": "FAILS"}[diagnosis.status]


def _lines(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    found, error = diagnosis.found, diagnosis.error
    has = f", Python {found['python']}, headrace {found['headrace']}, contract {found['contract']}" if found else ""
    yield "interpreter", f"{diagnosis.python}{has}"
    if found.get("versions"):
        yield "versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    if "capabilities" in found:
        yield "capabilities", _capabilities(found["capabilities"])
    if "told" in found:
        times = f"{found['seconds']:.1f} s after a start of {found['start_seconds']:.1f} s"
        yield "smoke test", f"{found['told']}; {times}"
    if error is not None:
        yield "problem", error.message
        if error.origin:
            yield "from", error.origin
        if error.fix and not diagnosis.commands:
            yield "fix", error.fix
    for number, command in enumerate(diagnosis.commands):
        yield "" if number else "set it up", command


def _capabilities(declared: Mapping[str, Any]) -> str:
    words = []
    for name, value in declared.items():
        if value is True:
            words.append(name)
        elif value not in (False, None, []):
            words.append(f"{name} {'/'.join(value) if isinstance(value, list) else value}")
    return ", ".join(words)
