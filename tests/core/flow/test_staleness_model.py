"""The gates of the policies, checked exhaustively: every reachable state of a small flow, in counts.

Groups of one version are alike, so that a state is how many groups of each age are in flight and ready, what the
current batch holds, and how far it is. All orders of completion, drop, release and publication are covered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from headrace.contract import FlowView, StalenessPolicy
from headrace.errors import StalenessError
from headrace.flow.batching import oldest_first
from headrace_staleness.delayed_update import DelayedUpdate
from headrace_staleness.multi_version import MultiVersion
from headrace_staleness.partial_rollout import PartialRollout
from headrace_staleness.synchronous import Synchronous
from headrace_staleness.windowed import Windowed
from support.flow_model import most_in_flight

Ages = tuple[int, ...]


@dataclass(frozen=True)
class State:
    """Counts by age (newest version − version); ``held``: the batch on lease, () when none is."""

    in_flight: Ages
    ready: Ages
    held: Ages = ()
    trained: bool = False


class TooStaleError(Exception):
    """A group can only be trained beyond the bound now."""


class Model:
    def __init__(self, policy: StalenessPolicy, *, batch_groups: int) -> None:
        self.policy, self.batch_groups = policy, batch_groups
        self.ages = range(policy.max_staleness + 1)

    def view(self, state: State, *, last_part: int = 0) -> FlowView:
        newest = self.policy.max_staleness

        def by_version(counts: Ages) -> dict[int, int]:
            return {newest - age: count for age, count in enumerate(counts) if count}

        return FlowView(
            batch_groups=self.batch_groups,
            version=newest,
            batch_taken=bool(state.held) or state.trained,
            in_flight=by_version(state.in_flight),
            ready=by_version(state.ready),
            last_part=last_part,
        )

    def progress(self, state: State) -> Iterator[State]:
        """What the flow itself can do."""
        view = self.view(state)
        # A batch that was trained in parts or not: neither overshoots, and after either there is always a next step.
        if max(self.policy.admit(self.view(state, last_part=part)) for part in (0, self.batch_groups)) > 0:
            yield replace(state, in_flight=_add(state.in_flight, 0, 1))
            for age in self.ages[1:]:
                if state.in_flight[age] and self.policy.may_fill(view, view.version - age):
                    yield replace(state, in_flight=_add(state.in_flight, age, 1))
        chosen = oldest_first(view.ready, groups=self.batch_groups)
        if not view.batch_taken and chosen is not None and self.policy.may_take(view, chosen):
            held = tuple(chosen.get(view.version - age, 0) for age in self.ages)
            yield replace(state, ready=tuple(r - h for r, h in zip(state.ready, held, strict=True)), held=held)
        if state.held:
            yield replace(state, held=(), trained=True)
        if state.trained and self.policy.may_publish(view):
            if state.in_flight[-1] or state.ready[-1]:
                raise TooStaleError(state)
            yield State(in_flight=(0, *state.in_flight[:-1]), ready=(0, *state.ready[:-1]))

    def events(self, state: State) -> Iterator[State]:
        """What happens to it: a group completes or is dropped, the batch is given back."""
        for age in self.ages:
            if state.in_flight[age]:
                fewer = replace(state, in_flight=_add(state.in_flight, age, -1))
                yield fewer
                yield replace(fewer, ready=_add(state.ready, age, 1))
        if state.held:
            back = tuple(r + h for r, h in zip(state.ready, state.held, strict=True))
            yield replace(state, ready=back, held=())

    def explore(self) -> tuple[set[State], list[State]]:
        """All reachable states, and those with nothing in flight in which the flow can do nothing."""
        none = (0,) * len(self.ages)
        seen = {State(in_flight=none, ready=none)}
        frontier, stuck = list(seen), []
        while frontier:
            state = frontier.pop()
            own = list(self.progress(state))
            if not own and not any(state.in_flight):
                stuck.append(state)
            for following in [*own, *self.events(state)]:
                if following not in seen:
                    seen.add(following)
                    frontier.append(following)
        return seen, stuck


def _add(counts: Ages, age: int, change: int) -> Ages:
    return tuple(count + change * (at == age) for at, count in enumerate(counts))


def multi_version(max_staleness: int, outstanding_batches: float | None = None, **more: Any) -> MultiVersion:
    settings = MultiVersion.Settings(max_staleness=max_staleness, outstanding_batches=outstanding_batches, **more)
    return MultiVersion(settings)


def windowed(max_staleness: int) -> Windowed:
    return Windowed(Windowed.Settings(max_staleness=max_staleness))


@pytest.mark.parametrize(
    ("policy", "batch_groups"),
    [
        (Synchronous(Synchronous.Settings()), 3),
        (multi_version(0), 3),
        (multi_version(1), 3),
        (multi_version(2), 2),
        (multi_version(2, 1), 2),
        (multi_version(2, 1.5), 2),
        (multi_version(3, 3), 2),
        (multi_version(4), 2),
        (multi_version(3, legacy_filling=True), 2),
        (multi_version(4, 3, legacy_filling=True), 1),
        (multi_version(0, waits="batch"), 3),
        (multi_version(1, waits="batch"), 3),
        (multi_version(2, waits="batch"), 2),
        (multi_version(2, 1.5, waits="batch"), 2),
        (multi_version(3, 3, waits="batch"), 2),
        (multi_version(4, waits="batch"), 1),
        (multi_version(3, waits="batch", legacy_filling=True), 2),
        (multi_version(4, 3, waits="batch", legacy_filling=True), 1),
        (PartialRollout(PartialRollout.Settings(max_staleness=0)), 3),
        (PartialRollout(PartialRollout.Settings(max_staleness=2)), 2),
        (PartialRollout(PartialRollout.Settings(max_staleness=3, outstanding_batches=3)), 1),
        (windowed(0), 3),
        (windowed(1), 3),
        (windowed(2), 2),
        (windowed(3), 1),
        (DelayedUpdate(DelayedUpdate.Settings()), 1),
        (DelayedUpdate(DelayedUpdate.Settings()), 3),
    ],
)
def test_no_state_is_too_stale_or_stuck(policy: StalenessPolicy, batch_groups: int) -> None:
    policy.check(batch_groups=batch_groups)
    states, stuck = Model(policy, batch_groups=batch_groups).explore()
    assert len(states) > batch_groups
    assert stuck == []
    live = most_in_flight(policy)
    assert all(sum(count > 0 for count in state.in_flight) <= live for state in states)


class _Naive(MultiVersion):
    """Admission by a plain limit, as a first reading of the paper has it."""

    def admit(self, view: FlowView) -> int:
        return round(self._outstanding_batches * view.batch_groups) - view.outstanding


class _NaiveUngated(_Naive):
    def may_take(self, view: FlowView, chosen: Mapping[int, int]) -> bool:
        return True


class _FillsAnything(MultiVersion):
    """Older versions are filled as the paper's last step has it, whatever that does to the window."""

    def may_fill(self, view: FlowView, version: int) -> bool:
        return True


class _WaitsForReady(MultiVersion):
    """Publication also waits for what is ready, not only for what is in flight."""

    def may_publish(self, view: FlowView) -> bool:
        return super().may_publish(view) and super().may_publish(replace(view, in_flight=view.ready))


def build(kind: type[MultiVersion], max_staleness: int, outstanding_batches: float) -> MultiVersion:
    return kind(kind.Settings(max_staleness=max_staleness, outstanding_batches=outstanding_batches))


@pytest.mark.parametrize(("max_staleness", "outstanding_batches", "batch_groups"), [(1, 1.5, 2), (3, 3, 1)])
def test_the_counter_examples_overshoot_without_the_gate(
    max_staleness: int, outstanding_batches: float, batch_groups: int
) -> None:
    policy = build(_NaiveUngated, max_staleness, outstanding_batches)
    with pytest.raises(TooStaleError):
        Model(policy, batch_groups=batch_groups).explore()


def test_the_gate_alone_gets_stuck_when_more_is_outstanding_than_remains() -> None:
    _, stuck = Model(build(_Naive, 1, 1.5), batch_groups=2).explore()
    assert stuck
    with pytest.raises(StalenessError):
        build(MultiVersion, 1, 1.5).check(batch_groups=2)


def test_filling_any_older_version_gets_stuck() -> None:
    _, stuck = Model(build(_FillsAnything, 3, 3), batch_groups=1).explore()
    assert stuck, "more is due than the batches that remain can hold"


def test_publication_that_waits_for_finished_rows_gets_stuck() -> None:
    _, stuck = Model(build(_WaitsForReady, 2, 2), batch_groups=1).explore()
    assert stuck
