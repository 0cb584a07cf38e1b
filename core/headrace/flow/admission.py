"""How much may be outstanding, what a batch may hold and when a version may follow: the policy is asked, and checked.

Invariant: no batch leaves with a row whose staleness is negative or beyond ``max_staleness``, whatever the policy says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from headrace.contract import FlowView, StalenessPolicy
from headrace.errors import StalenessError
from headrace.flow.batching import oldest_first


class Admission:
    """Refuses, when constructed, settings that must deadlock or overshoot (StalenessError). ``room``: how many groups
    the batches can hold that are still to be taken; beyond that none starts, whatever the policy says."""

    def __init__(self, policy: StalenessPolicy, *, batch_groups: int, room: Callable[[], float]) -> None:
        policy.check(batch_groups=batch_groups)
        self._policy = policy
        self._room = room
        self._publishable: int | None = None
        """The version whose successor the policy has let be published."""

    def admitted(self, view: FlowView) -> int:
        """How many groups may be added to what is outstanding."""
        return int(max(0, min(self._policy.admit(view), self._room() - view.outstanding)))

    def admits(self, view: FlowView, version: int, *, trained: bool) -> bool:
        """Whether one more group may start under ``version``. ``trained``: the batch of the newest version is. A
        version that may be published is not held up by a group that starts meanwhile."""
        if self.admitted(view) == 0 or not (version == view.version or self._policy.may_fill(view, version)):
            return False
        if not trained or not self._policy.may_publish(view):
            return True
        in_flight = {**view.in_flight, version: view.in_flight.get(version, 0) + 1}
        return self._policy.may_publish(replace(view, in_flight=in_flight))

    def batch(self, view: FlowView) -> dict[int, int] | None:
        """Groups by version of the batch that may be taken now; None when none may."""
        if view.batch_taken:
            return None
        chosen = oldest_first(view.ready, groups=view.batch_groups)
        if chosen is None or not (self._policy.may_take(view, chosen) or self._nothing_comes(view)):
            return None
        for version in chosen:
            staleness = view.version - version
            if not 0 <= staleness <= self._policy.max_staleness:
                raise StalenessError(
                    f"a batch of version {view.version} would hold groups of version {version}: staleness "
                    f"{staleness} is outside 0 … {self._policy.max_staleness}",
                    origin=f"staleness policy {type(self._policy).__name__}",
                    fix="this is a fault of the policy: may_take or may_publish allowed too much",
                )
        return chosen

    def certain(self, view: FlowView) -> int:
        """How many groups, the first that are ready, are sure to be in the next batch, which takes the oldest version
        first, and of a version those that were ready first: whatever becomes of the older ones that are outstanding,
        and may come before them, there is room for these."""
        certain = before = 0
        for version in sorted({*view.in_flight, *view.ready}):
            ready = view.ready.get(version, 0)
            certain += max(0, min(ready, view.batch_groups - before))
            before += ready + view.in_flight.get(version, 0)
        return 0 if view.batch_taken else certain

    def publishes(self, view: FlowView) -> bool:
        """Whether the next version may be published, its batch being trained. A yes stands until that has happened:
        publication takes its time, and groups may be lost meanwhile."""
        if self._policy.may_publish(view) or self._nothing_comes(view):
            self._publishable = view.version
        return self._publishable == view.version

    def _nothing_comes(self, view: FlowView) -> bool:
        """Whether, before the phase ends, nothing is in flight and nothing starts any more: a policy that would wait
        for that, to have its batches as old as it wants them for example, would wait for ever."""
        return not any(view.in_flight.values()) and self._room() <= view.outstanding
