"""Writes what engines declare into README.md, between its two marks; with ``--check``, says whether it stands there.

``make format`` runs it. Only what comes with headrace is shown, with the settings that it has by itself.
"""

import dataclasses
import sys
from pathlib import Path

from headrace.registry import listing, load

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- capabilities: written by make format -->", "<!-- end of capabilities -->"
WORDS = {
    "instances": "instances",
    "slots": "requests at once",
    "live_versions": "policy versions at once",
    "deterministic": "same batches in every run",
    "scoring": "scores given tokens",
    "kv_migration": "requests move with keys and values",
    "dtype": "computes in",
    "max_length": "longest sequence",
    "low_bit": "low-bit weights",
    "adapters": "base and adapters apart",
    "adapter": "trains an adapter alone",
    "snapshots": "frozen snapshots",
    "scratch": "makes fresh models",
    "values": "critic",
}
"""Of fields; others are their own."""
ABSENT = {"instances": "any number", "max_length": "the model's"}
"""What None means."""


def main() -> None:
    """Exit with what is wrong, if anything is."""
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        sys.exit(f"README.md has not both marks {BEGIN} and {END}")
    wanted = f"{before}{BEGIN}\n{tables()}\n{END}{after}"
    if "--check" not in sys.argv:
        README.write_text(wanted)
    elif text != wanted:
        sys.exit("what README.md says of capabilities is not what engines declare: make format writes it anew")


def tables() -> str:
    """A table for each role of engines: a line for each capability, a column for each engine."""
    return "\n\n".join(table(role) for role in ("inference_engine", "training_engine"))


def table(role: str) -> str:
    """In the order in which the contract has them."""
    names = [each.name for each in listing(role) if each.distribution == "headrace"]
    classes = [load(role, name) for name in names]
    declared = [dataclasses.asdict(cls.capabilities(cls.Settings())) for cls in classes]
    rows = [(WORDS.get(field, field), [shown(field, each[field]) for each in declared]) for field in declared[0]]
    rows.append(("tested lock for an environment of its own", [shown("", cls.setup() is not None) for cls in classes]))
    lines = [f"| `{role}` | {' | '.join(f'`{name}`' for name in names)} |", f"|---|{'---|' * len(names)}"]
    return "\n".join([*lines, *(f"| {word} | {' | '.join(cells)} |" for word, cells in rows)])


def shown(field: str, value: object) -> str:
    """A cell."""
    if value is None:
        return ABSENT.get(field, "none")
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


if __name__ == "__main__":
    main()
