"""When failures of single trajectories become a failure of the run, and what is told of them.

A trajectory that fails (its episode or its score raised, ran past its deadline, crashed) is contained and counted by
reason. Invariant: once more than ``limit`` of the last ``window`` trajectories have failed, the run stops, with the
first of those failures as its author would want to see it. So it does at the start when as many have failed, whatever
became of the others: a reward that hangs shall not be waited for once for every trajectory of a batch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from headrace.errors import RunError

DETAIL_CHARACTERS = 4000
"""Bound of what is told of one failure."""
LINE_CHARACTERS = 240
"""Bound of a line of it: the frames of a traceback are shorter, and so is what a person reads of a message."""


class FailureShare:
    """Counts the newest ``window`` trajectories: as many as ``of`` has. ``limit``: share in 0..1."""

    def __init__(self, *, window: int, limit: float, of: str = "a batch") -> None:
        self._window = window
        self._limit = limit
        self._of = of
        self._recent: deque[tuple[int, int]] = deque()
        self._seen = 0
        self._failed = 0
        self._details: deque[str] = deque()
        self.reasons: Counter[str] = Counter()

    def record(self, *, trajectories: int, failed: Mapping[str, int], detail: str = "") -> None:
        """``failed``: how many of ``trajectories`` failed, by reason; ``detail``: the first one's traceback. RunError
        when the share has passed the limit."""
        count = sum(failed.values())
        self.reasons.update(failed)
        self._recent.append((trajectories, count))
        self._seen += trajectories
        self._failed += count
        if detail:
            self._details.append(detail)
        while self._seen - self._recent[0][0] >= self._window:
            old, old_failed = self._recent.popleft()
            self._seen -= old
            self._failed -= old_failed
        if self._failed == 0:
            self._details.clear()
        if self._failed > self._limit * max(self._seen, self._window):
            raise RunError(
                f"{self._failed} of the last {self._seen} trajectories failed, more than {self._limit:.0%} of the "
                f"{self._window} that {self._of} has: "
                f"{', '.join(f'{n} {r}' for r, n in self.reasons.most_common())}",
                origin=f"environment; the first of them:\n{_indented(self._details[0] if self._details else '')}",
                fix="mend the reward or environment, or raise [environment] max_failed_share",
            )


def gist(detail: str) -> str:
    """The line of a traceback or sentence that says what went wrong: the first that is not indented, after the last
    frame; without its middle when it is long."""
    lines = detail.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[frames[-1] :] if frames else lines
    return without_middle(next((line for line in after if line and not line[0].isspace()), ""), LINE_CHARACTERS)


def excerpt(detail: str) -> str:
    """A traceback without the middle of what is too long, so that its frames and the exception's class stay: an
    exception's message can be a whole answer, or a thousand of them."""
    lines = (without_middle(line, LINE_CHARACTERS) for line in detail.splitlines(keepends=True))
    return without_middle("".join(lines), DETAIL_CHARACTERS)


def without_middle(text: str, characters: int) -> str:
    """At most about so many ``characters`` of a text, half from each end."""
    half = characters // 2
    return text if len(text) <= characters else f"{text[:half]} ... {text[-half:]}"


def _indented(text: str) -> str:
    return "\n".join(f"    | {line}" for line in text.rstrip().splitlines())
