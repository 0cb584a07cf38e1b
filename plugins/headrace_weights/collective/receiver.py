"""An engine's side: a member of one group per version, and a receiver of chunks where that breaks.

Invariant: as of every receiver, a tensor is handed out only with the manifest's checksum, and once.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from headrace.contract import Array, WeightManifest
from headrace.errors import DeadlineError, WireError
from headrace.wire import Keys
from headrace_weights.collective.group import Group, Meeting, parcels
from headrace_weights.memory import Buffers
from headrace_weights.messages import AskRound, GiveRound
from headrace_weights.receiver import ZmqReceiver
from headrace_weights.tensors import places, typed

logger = logging.getLogger(__name__)

_SPARE_BYTES = 1 << 62
"""Memory of one version is kept from one to the next, whatever its size."""


class CollectiveReceiver(ZmqReceiver):
    """``seconds``: a group whose members are silent for so long is broken. ``window``: chunks of ``bucket_bytes`` that
    are on the way at a time then."""

    def __init__(
        self, address: str, *, bucket_bytes: int, seconds: float, window: int, keys: Keys | None = None
    ) -> None:
        super().__init__(address, chunk_bytes=bucket_bytes, window=window, keys=keys)
        self._bucket_bytes = bucket_bytes
        self._seconds = seconds
        self._buffers = Buffers(_SPARE_BYTES)
        self._name = secrets.token_hex(8)
        self._meeting: Meeting | None = None

    def fetch(self, manifest: WeightManifest, *, deadline: float) -> Iterator[tuple[str, Array]]:
        given = 0
        try:
            for item in self._by_group(manifest, deadline):
                given += 1
                yield item
            return
        except DeadlineError:
            raise
        except (RuntimeError, WireError) as error:
            logger.warning("%s: a round broke, asking for the rest: %s", self._address, error)
            self._leave()
        for number, item in enumerate(super().fetch(manifest, deadline=deadline)):
            if number >= given:
                yield item

    def close(self) -> None:
        self._leave()
        super().close()

    def _leave(self) -> None:
        """Whoever has left a group joins the next one under another name: nobody waits for it in that one."""
        self._name = secrets.token_hex(8)
        if self._meeting is not None:
            self._meeting.leave()

    def _by_group(self, manifest: WeightManifest, deadline: float) -> Iterator[tuple[str, Array]]:
        """RuntimeError when a member is gone, WireError for a tensor that arrived damaged."""
        group = self._group(manifest.version, deadline)
        nbytes = max((stop for _, _, stop in places(manifest)), default=0)
        data = self._buffers.take(nbytes)
        coming: deque[tuple[int, Any]] = deque(
            (begin, group.send(data[begin:end])) for begin, end, _ in parcels(manifest, self._bucket_bytes)
        )
        try:
            for info, start, stop in places(manifest):
                while coming and coming[0][0] < stop:
                    coming[0][1].wait()
                    coming.popleft()
                yield info.name, typed(info, data[start:stop], f"tensor {info.name} of version {manifest.version}")
        finally:
            for _, work in coming:  # what still arrives must not find its memory in other hands
                with suppress(RuntimeError):
                    work.wait()

    def _group(self, version: int, deadline: float) -> Group:
        question = AskRound(next(self._ids), version, self._name)
        self._ask(question)
        answer = self._await({question.id: question}, deadline, f"a group for version {version}")
        if not isinstance(answer, GiveRound):
            raise WireError(f"{self._address} gave something else where a group was asked for")
        if self._meeting is None or self._meeting.address != answer.store:
            self._meeting = Meeting(answer.store, serve=False, seconds=self._seconds)
        return self._meeting.group(answer.key, answer.rank)
