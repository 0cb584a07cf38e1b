"""``windowed``: how old rows get, how much is held, when iterations start, and what a wider window is worth."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.contract import StalenessPolicy
from headrace_staleness.synchronous import Synchronous
from headrace_staleness.windowed import Windowed
from support.virtual_fleet import BIMODAL, LOG_NORMAL, Simulation


def windowed(max_staleness: int) -> Windowed:
    return Windowed(Windowed.Settings(max_staleness=max_staleness))


@st.composite
def simulations(draw: st.DrawFn, *, drop_share: float = 0.0) -> Simulation:
    return Simulation(
        policy=windowed(draw(st.integers(0, 4))),
        lengths=draw(st.sampled_from([BIMODAL, LOG_NORMAL])),
        batch_groups=draw(st.integers(1, 6)),
        group_size=draw(st.integers(1, 3)),
        slots=draw(st.integers(1, 8)),
        live_versions=draw(st.integers(1, 3)),
        train=draw(st.sampled_from([0.1, 1.0, 6.0])),
        transfer=draw(st.sampled_from([0.0, 0.5])),
        drop_share=drop_share,
        seed=draw(st.integers(0, 2**32)),
    )


@settings(max_examples=40, deadline=None)
@given(simulation=simulations(drop_share=0.05))
def test_RLX_1_no_row_is_staler_than_the_bound_and_no_more_than_the_window_is_held(simulation: Simulation) -> None:
    simulation.run(batches=12)
    bound = simulation.policy.max_staleness
    assert 0 <= min(simulation.staleness) <= max(simulation.staleness) <= bound
    assert simulation.most_held <= simulation.batch_groups * (bound + 1)


@settings(max_examples=40, deadline=None)
@given(simulation=simulations())
def test_RLX_2_no_more_iterations_coexist_than_the_bound_and_one(simulation: Simulation) -> None:
    """The batch of a group's version is the oldest iteration that is left when the group starts."""
    simulation.run(batches=12)
    coexist = [
        place // simulation.batch_groups - version + 1 for place, (_, version) in enumerate(simulation.dispatched)
    ]
    assert max(coexist) <= simulation.policy.max_staleness + 1


def test_the_whole_window_is_used() -> None:
    """Where training is slow, rollout is ahead as far as it may."""
    for bound in (0, 1, 3):
        simulation = Simulation(policy=windowed(bound), lengths=lambda _: 0.1, slots=40, train=5.0)
        simulation.run(batches=12)
        assert max(simulation.staleness) == bound
        assert simulation.most_held == simulation.batch_groups * (bound + 1)


def test_RLX_3_a_bound_of_zero_is_the_synchronous_run_at_every_instant() -> None:
    def run(policy: StalenessPolicy) -> Simulation:
        simulation = Simulation(policy=policy, lengths=BIMODAL, drop_share=0.02, seed=5)
        simulation.run(batches=12)
        return simulation

    one, other = run(windowed(0)), run(Synchronous(Synchronous.Settings()))
    assert (one.trained, one.begun, one.finished) == (other.trained, other.begun, other.finished)


def test_a_wider_window_costs_no_time() -> None:
    times = [Simulation(policy=windowed(bound), lengths=BIMODAL, seed=3).run(batches=25) for bound in (0, 1, 2, 3)]
    assert times == sorted(times, reverse=True)
    assert times[3] < 0.7 * times[0]
