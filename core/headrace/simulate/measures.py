"""What a simulation measured: a record per training batch, and what follows from them once it is in its stride.

Invariant: every share is of the time between two publications, so that the parts of a step add up to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.flow import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """A training batch, from the publication of its version to that of the next. Seconds of the virtual clock."""

    version: int
    awaited: float
    """For which the trainer waited for groups."""
    trained: float
    """In which it trained."""
    blocked: float
    """For which it waited for leave to publish."""
    published: float
    """When the next version was."""
    response_tokens: int
    staleness: Mapping[int, int]
    """Versions → rows."""
    busy_seconds: float
    """Of all slots, in which they had a request, since the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One policy, after the warm-up. Shares are 0 to 1."""

    policy: str
    max_staleness: int
    step_seconds: float
    """Mean time from one publication to the next."""
    tokens_per_second: float
    """Response tokens of trained rows."""
    rollout_only_share: float
    """Of the time, in which the trainer waits: the bubble that asynchrony is to fill."""
    training_share: float
    """Of the time, in which it trains; what is left of 1 is publication."""
    slots_idle_share: float
    """Of the slots' time, in which they have no request."""
    staleness: Mapping[int, float]
    """Versions → share of rows, ascending."""
    bound_seconds: float
    """What a step takes at least: :func:`bound`."""
    of_bound: float
    """``bound_seconds / step_seconds``."""
    batches: int
    """Measured."""
    dispatched: int
    """Trajectories, the warm-up's too."""
    dropped: Mapping[str, int]
    """Trajectories by reason."""
    failures: int
    """Of instances."""
    moves: int
    """Trajectories that went on on another instance."""
    prefilled_again: float
    """Tokens whose KV was computed a second time."""

    @property
    def mean_staleness(self) -> float:
        return sum(versions * share for versions, share in self.staleness.items())


def bound(*, rollout: float, training: float, longest: float, max_staleness: int) -> float:
    """Seconds that a step takes at least: its tokens on all slots; its training; and the longest trajectory of a
    version, which spans at most K steps where publication waits for it (``multi_version``) or trajectories start at any
    time. With K = 0 training begins when it has ended. All are means, so that a short simulation may stray above. Where
    only batches wait, and trajectories start right after publications, it spans up to K + 1 steps."""
    if max_staleness == 0:
        return max(rollout, longest) + training
    return max(rollout, training, longest / max_staleness)


def outcome(
    records: Sequence[BatchRecord],
    *,
    policy: str,
    max_staleness: int,
    warm_up: int,
    slots: int,
    full_rate: float,
    longest: Mapping[int, float],
    publish_seconds: float,
    counts: Counts,
    failures: int,
    moves: int,
    prefilled_again: float,
) -> Outcome:
    """``slots``: of all instances. ``full_rate``: tokens per second of all instances with every slot busy.
    ``longest``: seconds from first to last token of each version's longest trajectory."""
    measured = records[warm_up:]
    begun, busy = (records[warm_up - 1].published, records[warm_up - 1].busy_seconds) if warm_up else (0.0, 0.0)
    seconds, batches = measured[-1].published - begun, len(measured)
    tokens = sum(record.response_tokens for record in measured)
    training = sum(record.trained for record in measured)
    staleness: Counter[int] = Counter()
    for record in measured:
        staleness.update(record.staleness)
    spans = [longest[record.version] for record in measured if record.version in longest]
    least = bound(
        rollout=tokens / batches / full_rate,
        training=training / batches + publish_seconds,
        longest=sum(spans) / len(spans) if spans else 0.0,
        max_staleness=max_staleness,
    )
    return Outcome(
        policy=policy,
        max_staleness=max_staleness,
        step_seconds=seconds / batches,
        tokens_per_second=tokens / seconds,
        rollout_only_share=sum(record.awaited + record.blocked for record in measured) / seconds,
        training_share=training / seconds,
        slots_idle_share=1 - (measured[-1].busy_seconds - busy) / (slots * seconds),
        staleness={versions: count / staleness.total() for versions, count in sorted(staleness.items())},
        bound_seconds=least,
        of_bound=least * batches / seconds,
        batches=batches,
        dispatched=counts.dispatched,
        dropped=counts.dropped,
        failures=failures,
        moves=moves,
        prefilled_again=prefilled_again,
    )
