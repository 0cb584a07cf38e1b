"""What the journals of a data plane under fire must say when all is over."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from support.kill_roles import GROUP, TASKS, Reader


class Issue(NamedTuple):
    """One time that a prompt was put."""

    prompt: int
    issue: int


@dataclass
class Books:
    """All journals. Rows are keys together with their task where a consumer wrote."""

    sums: dict[Issue, list[int]] = field(default_factory=dict)
    """What a producer said it would put."""
    rows: dict[int, tuple[Issue, int]] = field(default_factory=dict)
    """Puts that were answered, with the checksum."""
    unanswered: set[Issue] = field(default_factory=set)
    moves: int = 0
    """Of puts, to another unit."""
    lost: Counter[int] = field(default_factory=Counter)
    leased: dict[tuple[str, int], list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    """Attempts, and when the lease was asked for."""
    reads: list[dict[str, Any]] = field(default_factory=list)
    acknowledging: Counter[tuple[str, int]] = field(default_factory=Counter)
    acknowledged: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    refused: Counter[tuple[str, int]] = field(default_factory=Counter)
    unread: int = 0

    def take(self, line: dict[str, Any]) -> None:
        """Enter a line."""
        getattr(self, f"_{line['event']}")(line)

    def _asked(self, line: dict[str, Any]) -> None:
        self.sums[Issue(line["prompt"], line["issue"])] = line["sums"]

    def _unanswered(self, line: dict[str, Any]) -> None:
        self.unanswered.add(Issue(line["prompt"], line["issue"]))

    def _moved(self, line: dict[str, Any]) -> None:
        self.moves += line["times"]

    def _put(self, line: dict[str, Any]) -> None:
        self.rows[line["row"]] = Issue(line["prompt"], line["issue"]), line["sum"]

    def _lost(self, line: dict[str, Any]) -> None:
        self.lost[line["group"]] += 1

    def _leased(self, line: dict[str, Any]) -> None:
        self.leased[line["task"], line["row"]].append((line["attempts"], line["time"]))

    def _read(self, line: dict[str, Any]) -> None:
        self.reads.append(line)

    def _unread(self, line: dict[str, Any]) -> None:
        self.unread += 1

    def _acknowledging(self, line: dict[str, Any]) -> None:
        self.acknowledging[line["task"], line["row"]] += 1

    def _acknowledged(self, line: dict[str, Any]) -> None:
        self.acknowledged[line["task"], line["row"]].append(line["time"])

    def _refused(self, line: dict[str, Any]) -> None:
        self.refused[line["task"], line["row"]] += 1

    def in_doubt(self, key: tuple[str, int]) -> int:
        """Acknowledgements whose consumer was killed before it heard the answer."""
        return self.acknowledging[key] - len(self.acknowledged[key]) - self.refused[key]


def read_books(directory: Path) -> Books:
    books = Books()
    for line in Reader(directory, "*.jsonl").new():
        books.take(line)
    return books


def violations(books: Books) -> list[str]:
    """Of the rules, in words; empty when all hold."""
    return [
        *_values(books),
        *_leases(books),
        *_acknowledgements(books),
        *_lost_groups(books),
        *_prompts(books),
    ]


def _values(books: Books) -> list[str]:
    found = []
    for line in books.reads:
        issue = Issue(line["prompt"], line["issue"])
        put = books.rows.get(line["row"])
        if put is not None:
            right = put == (issue, line["sum"])
        else:
            right = issue in books.unanswered and books.sums[issue][line["row"] % GROUP] == line["sum"]
        if not (right and line["scored"]):
            found.append(f"row {line['row']} was read as {line}, put as {put}")
    return found


def _leases(books: Books) -> list[str]:
    found = []
    for (task, row), leases in books.leased.items():
        attempts = Counter(attempt for attempt, _ in leases)
        found += [f"row {row} had attempt {a} of {task} {n} times" for a, n in attempts.items() if n > 1]
        for acknowledged in books.acknowledged[task, row]:
            if any(asked > acknowledged for _, asked in leases):
                found.append(f"row {row} was given to {task} again after it was acknowledged")
    return found


def _acknowledgements(books: Books) -> list[str]:
    found = []
    for (task, row), times in list(books.acknowledged.items()):
        if len(times) > 1:
            found.append(f"{task} acknowledged row {row} {len(times)} times")
    for row in books.rows:
        for task in TASKS:
            done = len(books.acknowledged[task, row]) == 1 or books.in_doubt((task, row)) > 0
            if not done and row // GROUP not in books.lost:
                found.append(f"{task} never acknowledged row {row}, and it was not lost")
    return found


def _lost_groups(books: Books) -> list[str]:
    """A group that no answered put made is of one that remained without an answer, or of one that moved: of each unit
    that it moved away from."""
    found = [f"group {group} was named as lost {times} times" for group, times in books.lost.items() if times > 1]
    unknown = {group for group in books.lost if group * GROUP not in books.rows}
    if len(unknown) > len(books.unanswered) + books.moves:
        found.append(
            f"{len(unknown)} lost groups were never put; {len(books.unanswered)} puts had no answer, "
            f"and puts moved {books.moves} times"
        )
    return found


def _prompts(books: Books) -> list[str]:
    """One issue of every prompt was neither lost nor left without an answer."""
    kept = Counter(issue.prompt for row, (issue, _) in books.rows.items() if row // GROUP not in books.lost)
    wrong = {issue.prompt: kept[issue.prompt] for issue in books.sums if kept[issue.prompt] != GROUP}
    return [f"prompt {prompt} is in {rows} rows that were kept, not in {GROUP}" for prompt, rows in wrong.items()]


def figures(books: Books) -> dict[str, int]:
    """What happened."""
    attempts = [attempt for leases in books.leased.values() for attempt, _ in leases]
    return {
        "prompts": len({issue.prompt for issue in books.sums}),
        "rows_put": len(books.rows),
        "puts_without_answer": len(books.unanswered),
        "puts_moved": books.moves,
        "groups_lost": len(books.lost),
        "rows_acknowledged": sum(map(len, books.acknowledged.values())),
        "acknowledgements_in_doubt": sum(books.in_doubt(key) > 0 for key in books.acknowledging),
        "acknowledgements_refused": sum(books.refused.values()),
        "rows_leased_again": sum(attempt > 1 for attempt in attempts),
        "rows_not_readable": books.unread,
    }
