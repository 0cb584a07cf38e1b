"""The trainer's side: what the transport ``zmq`` has, and a thread that sends versions to groups.

Invariant: who joins a round is in it until it is closed; only then does anybody learn how many they are.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.contract import Array
from headrace.wire import Keys
from headrace_weights.collective.group import Meeting, parcels
from headrace_weights.messages import Answer, AskRound, GiveRound
from headrace_weights.publisher import PublishedVersion, ZmqPublisher
from headrace_weights.tensors import nbytes_of, places

logger = logging.getLogger(__name__)

_GATHER_SECONDS = 0.02
"""From the first engine that wants a version until it is sent: others that were told of it at once come too."""


@dataclass(slots=True)
class Round:
    """One group in the making. ``key``: what it meets under; ``ranks``: by joiner."""

    key: str
    version: PublishedVersion
    ranks: dict[str, int] = field(default_factory=dict)


class CollectivePublisher(ZmqPublisher):
    """``meeting``: where groups meet."""

    def __init__(self, address: str, meeting: Meeting, *, bucket_bytes: int, keys: Keys | None = None) -> None:
        self._meeting = meeting
        self._bucket_bytes = bucket_bytes
        self._open: deque[Round] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._members: frozenset[str] = frozenset()
        """Of the last group."""
        self._joined: deque[tuple[int, int]] = deque([(-1, 0)], maxlen=2)
        """The last two versions that were sent, and how many engines had them."""
        super().__init__(address, keys=keys)
        self._sender = threading.Thread(target=self._send_rounds, name="weight-groups", daemon=True)
        self._sender.start()

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._sender.join()
        super().close()

    def _join(self, question: AskRound, version: PublishedVersion) -> Answer:
        with self._changed:
            found = next((r for r in self._open if r.version is version), None)
            if found is None:
                found = Round(secrets.token_hex(8), version)
                self._open.append(found)
            rank = found.ranks.setdefault(question.joiner, len(found.ranks) + 1)
            self._changed.notify()
        return GiveRound(question.id, self._meeting.address, found.key, rank)

    def _send_rounds(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._ended)
                self._gather()
                if self._ended:
                    return
                closed = self._open.popleft()
                self._count(closed)
            try:
                self._send(closed)
            except RuntimeError as error:  # a member is gone: the others notice, and ask for what they lack
                self._meeting.leave()
                logger.warning("%s: a round of %d engines broke: %s", self._address, len(closed.ranks), error)

    def _gather(self) -> None:
        """Let others into the round that is closed next: not for long, and no longer than until as many are there as
        had the version before. Called, and returns, with the lock held."""
        self._changed.wait_for(lambda: self._ended or self._complete(self._open[0]), timeout=_GATHER_SECONDS)

    def _complete(self, gathering: Round) -> bool:
        number = gathering.version.manifest.version
        had = next((count for version, count in reversed(self._joined) if version != number), 0)
        already = sum(count for version, count in self._joined if version == number)
        return bool(had) and len(gathering.ranks) + already >= had

    def _count(self, closed: Round) -> None:
        number, count = closed.version.manifest.version, len(closed.ranks)
        if self._joined[-1][0] == number:
            count += self._joined.pop()[1]
        self._joined.append((number, count))

    def _send(self, closed: Round) -> None:
        version, members = closed.version, frozenset(closed.ranks)
        known = self._meeting.group_key if members == self._members else ""
        self._meeting.close_round(closed.key, group_key=known or closed.key, world=len(members) + 1)
        group, self._members = self._meeting.group(closed.key, 0), members
        starts = [start for _, start, _ in places(version.manifest)]
        sent: list[tuple[Any, Array]] = []
        for begin, end, tensors in parcels(version.manifest, self._bucket_bytes):
            if len(tensors) == 1:
                number = tensors[0][0]
                data = np.frombuffer(version.tensors[number], np.uint8)[begin - starts[number] : end - starts[number]]
            else:
                data = np.zeros(end - begin, np.uint8)
                for number, info in tensors:
                    at = starts[number] - begin
                    data[at : at + nbytes_of(info)] = np.frombuffer(version.tensors[number], np.uint8)
            sent.append((group.send(data), data))
        for work, _ in sent:
            work.wait()
