"""Which group starts next, where it may be chosen: those that will take long right after a publication.

A trajectory has the more time before the window waits for it, the earlier it starts after its version was published. So
each publication makes a *block* of as many groups as a batch has, and gives it out from the longest down. How long a
group will take is what the longest answer to its prompt took before; of prompts that nobody has answered nothing is
known, and they are taken to be average.

Who would start when little time is left, because the next publication is all that is missing or because the block ran
out early, is no *long* one, of the longest eighth of its block: those wait for the publication. Nobody waits for two:
what is left of a block comes before the next one, whenever that is. None of them is queued at an instance whose slots
are taken, perhaps by others that take as long: who starts when it is served has most time, not who is sent first.

Invariant: every group starts once, and none is skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from headrace.flow.ledger import Ledger

_LONG = 8
"""One in so many groups of a block is long."""
_NEWEST = 0.5
"""Weight of what a prompt's answers took last."""


class LongestFirst:
    """``prompt``: group → its prompt. ``groups``: of a batch."""

    def __init__(self, ledger: Ledger, *, prompt: Callable[[int], int], groups: int) -> None:
        self._ledger = ledger
        self._prompt = prompt
        self._size = groups
        self._took: dict[int, float] = {}
        """Prompt → tokens of its longest answer, the last ones counting most."""
        self._sum = 0.0
        """Of those."""
        self._long: set[int] = set()
        self._longest: set[int] = set()
        """Those, and such as were long in an earlier block; none of them has started."""
        self._late: list[int] = []
        """Long groups that wait for the next publication."""
        self._queue = deque(self._block(ledger.reserved))
        """Groups in the order in which they start."""

    def observed(self, group: int) -> None:
        """A group is complete."""
        prompt, tokens = self._prompt(group), float(max(self._ledger.tokens(group)))
        before = self._took.get(prompt, 0.0)
        self._took[prompt] = before + _NEWEST * (tokens - before) if before else tokens
        self._sum += self._took[prompt] - before

    def published(self) -> None:
        """A version was: what starts now has most time."""
        self._queue = deque([*self._late, *self._queue])
        self._late.clear()
        self._long.clear()
        missing = self._size - len(self._queue)
        if missing > 0:
            self._queue.extend(self._block(self._ledger.reserve(missing)))

    @property
    def is_long_next(self) -> bool:
        """Whether the group that comes next is of the longest, and to be given a slot at once."""
        return bool(self._queue) and self._queue[0] in self._longest

    def next(self, *, late: bool) -> int:
        """The group to open. ``late``: only the publication of the next version is missing."""
        while True:
            if not self._queue:
                block = self._block(self._ledger.reserve(self._size))
                self._late.extend(group for group in block if group in self._long)
                self._queue.extend(group for group in block if group not in self._long)
            group = self._queue.popleft()
            if not late or group not in self._long:
                self._long.discard(group)
                self._longest.discard(group)
                return group
            self._late.append(group)

    def _block(self, groups: Iterable[int]) -> list[int]:
        """The longest first, else in the order in which they came."""
        took = {group: self._took.get(self._prompt(group)) for group in groups}
        mean = self._sum / len(self._took) if self._took else 0.0
        block = sorted(took, key=lambda group: -(took[group] or mean))
        long = {group for group in block[: len(block) // _LONG] if took[group] is not None}
        self._long |= long
        self._longest |= long
        return block
