"""The policies by themselves: which settings they refuse, and their edges."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.contract import FlowView
from headrace.errors import StalenessError
from headrace_staleness.deadlines import Deadlines
from headrace_staleness.delayed_update import DelayedUpdate
from headrace_staleness.multi_version import MultiVersion
from headrace_staleness.partial_rollout import PartialRollout
from headrace_staleness.synchronous import Synchronous
from headrace_staleness.windowed import Windowed


def multi_version(max_staleness: int, outstanding_batches: float | None = None, **more: Any) -> MultiVersion:
    settings = MultiVersion.Settings(max_staleness=max_staleness, outstanding_batches=outstanding_batches, **more)
    return MultiVersion(settings)


def partial_rollout(max_staleness: int, **more: Any) -> PartialRollout:
    return PartialRollout(PartialRollout.Settings(max_staleness=max_staleness, **more))


def windowed(max_staleness: int) -> Windowed:
    return Windowed(Windowed.Settings(max_staleness=max_staleness))


def delayed_update(max_staleness: int = 1) -> DelayedUpdate:
    return DelayedUpdate(DelayedUpdate.Settings(max_staleness=max_staleness))


def view(
    *,
    version: int = 10,
    taken: bool = False,
    in_flight: dict[int, int] | None = None,
    ready: dict[int, int] | None = None,
    last_part: int = 0,
) -> FlowView:
    return FlowView(
        batch_groups=4,
        version=version,
        batch_taken=taken,
        in_flight=in_flight or {},
        ready=ready or {},
        last_part=last_part,
    )


@pytest.mark.parametrize(
    ("max_staleness", "outstanding_batches"), [(0, None), (0, 1), (1, 1), (2, 1.5), (2, 2), (3, 3.0), (5, None)]
)
def test_settings_that_work_are_accepted(max_staleness: int, outstanding_batches: float | None) -> None:
    multi_version(max_staleness, outstanding_batches).check(batch_groups=4)


def test_more_outstanding_than_can_be_trained_in_time_is_refused_with_the_inequality() -> None:
    with pytest.raises(StalenessError) as caught:
        multi_version(1, 1.5).check(batch_groups=32)
    assert "1.5 · 32 = 48 > max(max_staleness, 1) · groups = 1 · 32 = 32" in caught.value.message
    assert caught.value.fix == "set outstanding_batches to at most 1, or raise max_staleness"


@pytest.mark.parametrize("outstanding_batches", [0.9, 0.0, -1.0, float("nan")])
def test_less_outstanding_than_a_batch_is_refused_with_the_inequality(outstanding_batches: float) -> None:
    with pytest.raises(StalenessError, match=f"outstanding_batches = {outstanding_batches:g} < 1"):
        multi_version(2, outstanding_batches).check(batch_groups=32)


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(StalenessError, match="max_staleness = -1 < 0"):
        multi_version(-1).check(batch_groups=1)


def test_the_synchronous_policy_knows_no_other_bound_than_zero() -> None:
    Synchronous(Synchronous.Settings()).check(batch_groups=4)
    Synchronous(Synchronous.Settings(max_staleness=0)).check(batch_groups=4)
    with pytest.raises(StalenessError) as caught:
        Synchronous(Synchronous.Settings(max_staleness=1)).check(batch_groups=4)
    assert caught.value.fix == 'leave max_staleness out, or set policy = "multi_version"'


@pytest.mark.parametrize("max_staleness", [0, 2, -1])
def test_the_delayed_update_knows_no_other_bound_than_one(max_staleness: int) -> None:
    delayed_update().check(batch_groups=4)
    with pytest.raises(StalenessError, match=f"max_staleness = {max_staleness} != 1: .* 1 by definition") as caught:
        delayed_update(max_staleness).check(batch_groups=4)
    assert "set max_staleness = 1" in caught.value.fix


def test_a_window_without_room_for_one_iteration_is_refused_with_the_inequality() -> None:
    windowed(0).check(batch_groups=4)
    with pytest.raises(StalenessError, match=r"max_staleness = -1 < 0: .* 0 - 0 <= -1 never holds"):
        windowed(-1).check(batch_groups=4)


def test_only_a_bound_of_zero_is_lockstep() -> None:
    assert Synchronous(Synchronous.Settings()).lockstep
    assert multi_version(0).lockstep
    assert windowed(0).lockstep
    assert not any(policy.lockstep for policy in (multi_version(1), windowed(1), delayed_update()))


def test_at_most_two_batches_are_outstanding_by_default() -> None:
    assert [multi_version(bound).admit(view()) for bound in (0, 1, 2, 3, 8)] == [4, 4, 8, 8, 8]
    assert [multi_version(bound).admit(view(taken=True)) for bound in (0, 1, 2, 3, 8)] == [0, 4, 8, 8, 8]


def test_what_is_outstanding_counts_against_the_limit_whether_finished_or_not() -> None:
    policy = multi_version(2, 1.5)
    assert policy.admit(view(in_flight={10: 2, 9: 1}, ready={9: 2})) == 1
    assert policy.admit(view(in_flight={10: 6}, ready={9: 2})) == 0


@pytest.mark.parametrize("policy", [multi_version(2, waits="batch"), partial_rollout(2, waits="batch")])
def test_once_a_batch_had_to_wait_groups_start_after_the_publication_that_follows_it(policy: Deadlines) -> None:
    left = {"in_flight": {9: 1, 10: 2}, "ready": {10: 1}}
    assert policy.admit(view(taken=True, last_part=1, **left)) == 0
    assert policy.admit(view(version=11, **left)) == 4


def test_groups_wait_for_no_publication_that_is_far_or_that_they_gain_nothing_by() -> None:
    policy, left = multi_version(2, waits="batch"), {"in_flight": {9: 1, 10: 2}, "ready": {10: 1}}
    assert policy.admit(view(taken=True, last_part=2, **left)) == 4, "half of the batch is still to be trained"
    assert policy.admit(view(taken=True, last_part=1, in_flight={9: 1, 10: 3})) == 4, "it was for want of groups"
    assert multi_version(2).admit(view(taken=True, last_part=1, **left)) == 4, "publication waits, and may do so long"


def test_what_the_next_batch_lacks_waits_for_no_publication() -> None:
    policy = multi_version(2, waits="batch")
    assert policy.admit(view(taken=True, last_part=1, in_flight={10: 1}, ready={10: 1})) == 2


VIEWS = st.builds(
    FlowView,
    batch_groups=st.just(4),
    version=st.just(10),
    batch_taken=st.booleans(),
    in_flight=st.dictionaries(st.integers(8, 10), st.integers(1, 6)),
    ready=st.dictionaries(st.integers(8, 10), st.integers(1, 6)),
    last_part=st.integers(0, 4),
)


@given(view=VIEWS, bound=st.integers(0, 4))
def test_whoever_holds_groups_back_starts_no_other_ones_and_leaves_the_next_batch_its_own(
    view: FlowView, bound: int
) -> None:
    """As many as where publication waits, or fewer by no more than keeps a batch outstanding."""
    most, held = (multi_version(bound, waits=waits).admit(view) for waits in ("publication", "batch"))
    assert held <= most
    assert held == most or view.outstanding + held >= view.batch_groups
    assert held == most or view.batch_taken


def test_a_batch_may_not_leave_more_behind_than_later_batches_can_hold() -> None:
    policy = multi_version(3, 3)
    ready = {8: 1, 9: 1, 10: 2}
    chosen = dict(ready)
    assert policy.may_take(view(ready=ready, in_flight={8: 4, 9: 4}), chosen)
    assert not policy.may_take(view(ready=ready, in_flight={8: 5}), chosen), "batch 11 cannot hold 5 groups"
    assert not policy.may_take(view(ready=ready, in_flight={8: 4, 9: 5}), chosen), "batches 11 and 12 hold 8"
    assert not policy.may_take(view(ready=ready, in_flight={7: 1}), chosen), "batch 10 is the last for version 7"


def test_older_versions_are_filled_only_when_asked_and_only_in_time() -> None:
    gated = MultiVersion(MultiVersion.Settings(max_staleness=3, outstanding_batches=3, legacy_filling=True))
    assert gated.may_fill(view(in_flight={9: 1}), 9)
    assert not multi_version(3, 3).may_fill(view(in_flight={9: 1}), 9)
    assert not gated.may_fill(view(in_flight={8: 1}), 8), "the publication of version 11 waits for version 8"
    assert not gated.may_fill(view(taken=True, in_flight={8: 4, 9: 4}), 9), "batches 11 and 12 hold 8"
    assert gated.may_fill(view(taken=True, in_flight={8: 4, 9: 3}), 9)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_filling_older_versions_where_none_may_be_filled_is_refused(max_staleness: int) -> None:
    settings = MultiVersion.Settings(max_staleness=max_staleness, legacy_filling=True)
    with pytest.raises(StalenessError, match=f"legacy_filling with max_staleness = {max_staleness} < 3"):
        MultiVersion(settings).check(batch_groups=4)


def test_a_batch_holds_nothing_beyond_the_bound() -> None:
    policy = multi_version(1)
    assert policy.may_take(view(ready={9: 4}), {9: 4})
    assert not policy.may_take(view(ready={8: 1, 9: 3}), {8: 1, 9: 3})


def test_the_window_waits_for_what_is_in_flight_and_not_for_what_is_finished() -> None:
    policy = multi_version(2)
    assert not policy.may_publish(view(in_flight={9: 1}))
    assert policy.may_publish(view(in_flight={10: 4}, ready={9: 1}))
    assert not multi_version(1).may_publish(view(in_flight={10: 1}))
    assert not multi_version(0).may_publish(view(in_flight={10: 1}))


def test_a_window_of_whole_iterations_is_one_longer_than_the_bound_and_counts_the_one_in_training() -> None:
    assert [windowed(bound).admit(view()) for bound in (0, 1, 3)] == [4, 8, 16]
    assert [windowed(bound).admit(view(taken=True)) for bound in (0, 1, 3)] == [0, 4, 12]
    assert windowed(1).admit(view(in_flight={9: 3}, ready={10: 4})) == 1


def test_iterations_are_trained_in_the_order_in_which_they_started() -> None:
    assert not windowed(2).may_take(view(in_flight={9: 1}, ready={10: 4}), {10: 4})
    assert windowed(2).may_take(view(in_flight={10: 1}, ready={9: 2, 10: 2}), {9: 2, 10: 2})


def test_the_producer_gate_is_the_only_one() -> None:
    assert windowed(1).may_publish(view(taken=True, in_flight={10: 4}))


def test_the_delayed_update_holds_one_iteration_beside_the_one_in_training() -> None:
    policy = delayed_update()
    assert [policy.admit(view(taken=taken)) for taken in (False, True)] == [4, 4]
    assert policy.admit(view(taken=True, in_flight={10: 2}, ready={10: 1})) == 1


def test_the_delayed_update_publishes_beside_an_iteration_that_was_dispatched_in_full() -> None:
    policy = delayed_update()
    assert not policy.may_publish(view(taken=True, in_flight={10: 3}))
    assert policy.may_publish(view(taken=True, in_flight={10: 3}, ready={10: 1}))
