"""``delayed_update``: one version per iteration, taken up one iteration late, with weights that travel meanwhile."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.contract import StalenessPolicy
from headrace.flow import Flow
from headrace_staleness.delayed_update import DelayedUpdate
from headrace_staleness.multi_version import MultiVersion
from support.virtual_fleet import BIMODAL, LOG_NORMAL, Simulation


def delayed() -> DelayedUpdate:
    return DelayedUpdate(DelayedUpdate.Settings())


@st.composite
def simulations(draw: st.DrawFn, *, drop_share: float = 0.0, live_versions: int = 1) -> Simulation:
    return Simulation(
        policy=delayed(),
        lengths=draw(st.sampled_from([BIMODAL, LOG_NORMAL])),
        batch_groups=draw(st.integers(1, 6)),
        group_size=draw(st.integers(1, 3)),
        slots=draw(st.integers(1, 8)),
        live_versions=draw(st.integers(live_versions, 3)),
        train=draw(st.sampled_from([0.1, 1.0, 6.0])),
        transfer=draw(st.sampled_from([0.0, 0.5, 3.0])),
        drop_share=drop_share,
        seed=draw(st.integers(0, 2**32)),
    )


@settings(max_examples=40, deadline=None)
@given(simulation=simulations())
def test_every_iteration_has_one_version_and_is_trained_one_version_later(simulation: Simulation) -> None:
    simulation.run(batches=10)
    size = simulation.batch_groups
    versions = [ticket.version for ticket, _ in simulation.dispatched]
    assert versions == [max(0, place // size - 1) for place in range(len(versions))]
    rows = size * simulation.group_size
    assert simulation.staleness == [0] * rows + [1] * 9 * rows


@settings(max_examples=40, deadline=None)
@given(simulation=simulations(drop_share=0.05))
def test_staleness_is_never_above_one_and_two_batches_are_held_whatever_is_lost(simulation: Simulation) -> None:
    simulation.run(batches=10)
    assert set(simulation.staleness) <= {0, 1}
    assert simulation.most_held <= 2 * simulation.batch_groups


@settings(max_examples=40, deadline=None)
@given(simulation=simulations(live_versions=2))
def test_rollout_waits_for_no_more_of_a_transfer_than_its_iteration_could_not_hide(simulation: Simulation) -> None:
    simulation.run(batches=10)
    for number, waited in gaps(simulation).items():
        hidden = last_finished(simulation, number - 1) - simulation.published[number - 1]
        assert waited <= max(0.0, simulation.transfer - hidden) + 1e-9


def test_a_transfer_that_an_iteration_hides_costs_nothing_and_at_the_boundary_it_would() -> None:
    def time(policy: StalenessPolicy, transfer: float) -> float:
        simulation = Simulation(policy=policy, lengths=lambda _: 4.0, slots=40, train=1.0, transfer=transfer)
        return simulation.run(batches=10)

    assert time(delayed(), 2.0) == time(delayed(), 0.0)
    at_the_boundary = MultiVersion(MultiVersion.Settings(max_staleness=1))
    assert time(at_the_boundary, 2.0) > time(at_the_boundary, 0.0)


def last_finished(simulation: Simulation, iteration: int) -> float:
    return max(simulation.finished[row] for row in rows_of(simulation, iteration))


def gaps(simulation: Simulation) -> dict[int, float]:
    """By iteration, from the third on: from the end of the one before it, and of the training that made its version,
    to its own first trajectory."""
    whole = len(simulation.trained)
    return {
        number: min(simulation.begun[row] for row in rows_of(simulation, number) if row in simulation.begun)
        - max(last_finished(simulation, number - 1), simulation.published[number - 1])
        for number in range(2, whole)
    }


def rows_of(simulation: Simulation, iteration: int) -> list[int]:
    size = simulation.batch_groups
    tickets = simulation.dispatched[iteration * size : (iteration + 1) * size]
    return [row for ticket, _ in tickets for row in ticket.trajectories]


def test_publication_that_was_granted_stands_when_a_group_is_lost_before_it() -> None:
    flow = Flow(policy=delayed(), batch_groups=2, group_size=1)
    flow.join("a", slots=10, live_versions=2, versions=(0,))
    for _ in range(2):
        assert flow.next_ticket() is not None
    for row in range(2):
        assert flow.stored(row, version=0, tokens=1, nbytes=1)
    lease = flow.take_batch(now=0.0, ttl=1.0)
    assert lease is not None
    assert flow.next_ticket() is not None
    flow.trained(lease.lease)
    assert not flow.may_publish(), "another group of this iteration is to start under version 0"
    assert flow.next_ticket() is not None
    assert flow.may_publish()
    flow.drop_group(3, "failed")
    assert flow.may_publish()
    flow.published(1)
    ticket = flow.next_ticket()
    assert ticket is None, "no instance serves version 1 yet"
