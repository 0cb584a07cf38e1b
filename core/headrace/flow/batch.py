"""The training batch of the newest version: taken at once, or in parts before it is complete.

Invariant: what is in a part is in the batch, unless the part is released; the policy is asked about the batch as if
nothing of it had been taken before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headrace.flow.leases import Lease
from headrace.flow.ledger import Ledger
from headrace.flow.records import BatchLease
from headrace.flow.stages import TRAIN


class OpenBatch:
    """``groups``: of a batch."""

    def __init__(self, ledger: Ledger, *, groups: int) -> None:
        self._ledger = ledger
        self._size = groups
        self._parts: list[Lease] = []
        self._versions: Counter[int] = Counter()
        """Version → groups in parts, by their oldest token."""
        self.whole: BatchLease | None = None
        self.last_part = 0
        """Groups that were taken last, to make it whole: of the batch that was whole last."""

    def holds(self, group: int) -> bool:
        """Whether a group is in it by now."""
        return any(group in part.groups for part in self._parts)

    def is_settled(self, version: int) -> bool:
        """Whether a part holds groups of a newer version, so that no group that is ready later, of this one, may come
        before them."""
        return self.whole is None and any(newest > version for newest in self._versions)

    @property
    def begun(self) -> bool:
        """Whether anything is in it."""
        return bool(self._parts)

    def ready(self) -> dict[int, int]:
        """Groups that are ready for it, or in it while it is not whole, by the version of their oldest token."""
        ready = self._ledger.ready(TRAIN)
        if self.whole is None:
            for version, groups in self._versions.items():
                ready[version] = ready.get(version, 0) + groups
        return ready

    def take_part(self, version: int, certain: int, *, deadline: float) -> BatchLease | None:
        """What is new of the first ``certain`` groups; None when nothing is."""
        count = certain - (self._size - self._missing)
        return self._lease(version, count, deadline) if count > 0 else None

    def take(self, version: int, *, deadline: float) -> BatchLease:
        """All of it: what is missing is ready."""
        self.last_part = self._missing
        if self._missing:
            self._lease(version, self._missing, deadline)
        self.whole = batch_lease(self._parts, version, self._ledger)
        return self.whole

    @property
    def _missing(self) -> int:
        return self._size - self._versions.total()

    def _lease(self, version: int, count: int, deadline: float) -> BatchLease:
        lease = self._ledger.lease(TRAIN, count, deadline=deadline)
        assert lease is not None, "only what is ready is taken"
        self._parts.append(lease)
        self._versions.update(self._ledger.oldest(lease.groups))
        return batch_lease([lease], version, self._ledger)

    def release(self, lease: int) -> None:
        """Give a part back, the last one by the lease of the whole: its groups may be taken again, as the batch of the
        same version. ValueError when it is not held."""
        self._ledger.release(lease)
        self._forget({lease})

    def release_all(self) -> None:
        """Give all of it back."""
        for part in list(self._parts):
            self.release(part.lease)

    def expire(self, now: float) -> tuple[Lease, ...]:
        """Release the leases whose deadline has come, of other consumers too; returns them."""
        expired = self._ledger.expire(now)
        self._forget({lease.lease for lease in expired})
        return expired

    def _forget(self, leases: set[int]) -> None:
        kept = [part for part in self._parts if part.lease not in leases]
        if len(kept) < len(self._parts):
            self._parts, self.whole = kept, None
            self._versions = Counter(version for part in kept for version in self._ledger.oldest(part.groups))

    def finish(self, lease: int) -> BatchLease:
        """The whole, by its lease, is done with. ValueError when it is not held any more."""
        if self.whole is None or self.whole.lease != lease:
            raise ValueError(f"lease {lease} is not held: it expired, was released or was acknowledged")
        done = self.whole
        for part in self._parts:
            self._ledger.acknowledge(part.lease)
        self._parts, self.whole = [], None
        self._versions.clear()
        return done


def batch_lease(parts: Sequence[Lease], version: int, ledger: Ledger) -> BatchLease:
    """The groups of leases as the training batch of ``version``, known by the last of them."""
    groups = tuple(sorted(group for part in parts for group in part.groups.tolist()))
    return BatchLease(
        lease=parts[-1].lease,
        version=version,
        groups=groups,
        rows=tuple(row for group in groups for row in ledger.rows(group)),
        tokens=tuple(count for group in groups for count in ledger.tokens(group)),
        deadline=min(part.deadline for part in parts),
    )
