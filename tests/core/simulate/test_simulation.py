"""The simulator against what can be computed by hand, and the promises of the flow that it drives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.contract import FlowView
from headrace.errors import StalenessError
from headrace.simulate.lengths import Bimodal, LogNormal
from headrace.simulate.scenario import Candidate
from headrace.simulate.simulation import Simulation, Span
from headrace_staleness.synchronous import Synchronous
from support.virtual_job import (
    candidate,
    delayed_update,
    multi_version,
    partial_rollout,
    run,
    scenario,
    synchronous,
    windowed,
)

HEAVY = LogNormal(median=10, sigma=1.2, cap=200)
POLICIES = st.one_of(
    st.just(synchronous()),
    st.just(delayed_update()),
    st.integers(0, 3).map(windowed),
    st.integers(0, 4).map(multi_version),
    st.integers(0, 4).map(partial_rollout),
)


# ---------------------------------------------------------------- closed forms


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    """16 trajectories of 10 tokens fit into 16 slots: with all 8 of an instance taken, a step of decoding takes
    1 + 7 · 0.1 s. Weights travel and are taken up while nothing else happens."""
    costs = {
        "step_seconds_per_request": 0.1,
        "prompt_tokens": 5,
        "prefill_seconds_per_token": 0.01,
        "request_seconds": 0.5,
        "scoring_seconds": 0.25,
        "train_seconds": 3.0,
        "train_seconds_per_token": 0.01,
        "publish_seconds": 0.75,
        "transfer_seconds": 0.4,
        "switch_seconds": 0.2,
    }
    decoding, prefill, training = 10 * 1.7, 8 * 5 * 0.01, 3.0 + 16 * (5 + 10) * 0.01
    found = run(scenario(costs=costs), synchronous())
    assert found.step_seconds == pytest.approx(0.5 + decoding + prefill + 0.25 + training + 0.75 + 0.4 + 0.2)
    assert found.training_share == pytest.approx(training / found.step_seconds)
    assert found.rollout_only_share == pytest.approx(1 - (training + 0.75) / found.step_seconds)
    assert found.tokens_per_second == pytest.approx(160 / found.step_seconds)


def test_waves_follow_each_other_when_slots_are_few() -> None:
    """16 trajectories on 2 x 4 slots: two waves of 10 steps."""
    assert run(scenario(slots=4), synchronous()).step_seconds == pytest.approx(20.0)


@pytest.mark.parametrize(("training", "step"), [(4.0, 10.0), (25.0, 25.0)])
def test_one_step_off_overlaps_training_with_the_next_iteration(training: float, step: float) -> None:
    for policy in (delayed_update(), multi_version(1)):
        assert run(scenario(costs={"train_seconds": training}), policy).step_seconds == pytest.approx(step)


def test_streaming_trains_on_groups_ahead_of_their_batch() -> None:
    """One wave of short groups, then one of long ones, on the same slots; training by the token is hidden behind it."""
    costs = {"train_seconds_per_token": 0.05}
    whole = run(scenario(slots=4, costs=costs), synchronous())
    parts = run(scenario(slots=4, costs=costs, streaming=True), synchronous())
    assert whole.step_seconds == pytest.approx(20.0 + 160 * 0.05)
    assert parts.step_seconds == pytest.approx(20.0 + 80 * 0.05)


def test_an_evaluation_takes_slots_from_training() -> None:
    """Every other step the 16 slots answer 16 held-out prompts first, and only then the groups of the batch."""
    at = scenario(evaluation_every=2, evaluation_answers=16)
    assert run(at, synchronous()).step_seconds == pytest.approx((10.0 + 20.0) / 2, rel=0.1)
    assert run(replace(at, evaluation_every=0), synchronous()).step_seconds == pytest.approx(10.0)


# ---------------------------------------------------------------- promises


@settings(max_examples=40, deadline=None)
@given(
    policy=POLICIES,
    seed=st.integers(0, 2**32),
    slots=st.integers(1, 8),
    live_versions=st.integers(1, 3),
    training=st.sampled_from([0.0, 5.0, 60.0]),
    transfer=st.sampled_from([0.0, 3.0]),
    failing=st.sampled_from([None, 150.0]),
    streaming=st.booleans(),
    migrates=st.booleans(),
    kv_tokens=st.sampled_from([None, 201, 500]),
)
def test_nothing_is_lost_and_no_row_is_staler_than_the_bound(
    policy: Candidate,
    seed: int,
    slots: int,
    live_versions: int,
    training: float,
    transfer: float,
    failing: float | None,
    streaming: bool,
    migrates: bool,
    kv_tokens: int | None,
) -> None:
    costs = {
        "train_seconds": training,
        "transfer_seconds": transfer,
        "seconds_between_failures": failing,
        "restart_seconds": 10.0,
        "kv_tokens": kv_tokens,
        "move_seconds": 0.5,
    }
    at = scenario(
        lengths=HEAVY,
        seed=seed,
        costs=costs,
        slots=slots,
        live_versions=live_versions,
        streaming=streaming,
        migrates=migrates,
    )
    simulation = Simulation(at, policy)
    found = simulation.run()
    assert max(found.staleness) <= found.max_staleness
    counts = simulation.flow.counts()
    assert counts.trained == at.batches * at.batch_groups * at.group_size
    assert counts.dispatched == counts.trained + counts.buffered + counts.in_flight + sum(counts.dropped.values())
    assert found.failures == 0 or failing is not None


@pytest.mark.parametrize("policy", [synchronous(), delayed_update(), windowed(2), multi_version(3)])
def test_the_same_seed_gives_the_same_outcome_and_another_seed_another(policy: Candidate) -> None:
    costs = {"train_seconds": 5.0, "seconds_between_failures": 300.0, "restart_seconds": 20.0}
    first, again, other = (run(scenario(lengths=HEAVY, seed=seed, costs=costs), policy) for seed in (1, 1, 2))
    assert first == again
    assert first.step_seconds != other.step_seconds


def test_a_wider_window_is_faster_where_a_long_tail_blocks_it() -> None:
    at = scenario(lengths=Bimodal(short=10, long=200, share=0.05), costs={"train_seconds": 10.0}, batches=60)
    steps = [run(at, multi_version(bound)).step_seconds for bound in (1, 2, 4)]
    assert steps == sorted(steps, reverse=True)
    assert steps[2] < 0.6 * steps[0]


def test_the_tail_of_an_old_version_moves_to_few_instances_where_each_hosts_one_version() -> None:
    at = scenario(
        lengths=Bimodal(short=10, long=200, share=0.05),
        costs={"train_seconds": 10.0, "prompt_tokens": 5, "prefill_seconds_per_token": 0.01},
        instances=8,
        slots=4,
        batch_groups=16,
        live_versions=1,
        batches=60,
    )
    handed, again = (run(replace(at, migrates=migrates), multi_version(4)) for migrates in (True, False))
    assert min(handed.moves, again.moves) > 0
    assert handed.prefilled_again == 0
    assert again.prefilled_again > 0
    assert run(replace(at, live_versions=5), multi_version(4)).moves == 0, "nobody is in the way"


def test_partial_rollout_pays_for_what_it_computes_again_and_multi_version_does_not() -> None:
    """Where that is free both are alike, and the first does with instances that host one version at a time."""
    tails = {"lengths": Bimodal(short=10, long=60, share=0.05), "batches": 60}
    free, dear = {"train_seconds": 20.0}, {"train_seconds": 20.0, "prefill_seconds_per_token": 0.05}
    pinned, interrupted = (
        run(scenario(**tails, costs=free), policy) for policy in (multi_version(3), partial_rollout(3))
    )
    assert interrupted.step_seconds == pytest.approx(pinned.step_seconds, rel=0.02)
    assert interrupted.prefilled_again > 0 == pinned.prefilled_again
    narrow = run(scenario(**tails, costs=free, live_versions=1), partial_rollout(3))
    assert narrow.step_seconds == pytest.approx(interrupted.step_seconds)
    again, kept = (
        run(scenario(**tails, costs=dear), policy) for policy in (partial_rollout(3), partial_rollout(3, keep_kv=True))
    )
    assert kept.prefilled_again == 0
    assert again.prefilled_again > 0
    assert kept.step_seconds <= again.step_seconds


def test_what_an_instance_had_starts_anew_when_it_fails() -> None:
    costs = {"seconds_between_failures": 60.0, "restart_seconds": 5.0}
    found = run(scenario(costs=costs, max_attempts=100, batches=40), synchronous())
    calm = run(scenario(batches=40), synchronous())
    assert found.failures > 0
    assert not found.dropped
    assert found.step_seconds > calm.step_seconds


def test_a_trajectory_that_fails_too_often_is_dropped_with_its_group() -> None:
    costs = {"seconds_between_failures": 60.0, "restart_seconds": 5.0}
    found = run(scenario(costs=costs, max_attempts=1, batches=40), synchronous())
    assert found.dropped["instance_lost"] > 0
    assert found.dropped["instance_lost"] % 2 == 0


def test_a_policy_that_waits_for_what_it_holds_back_is_named() -> None:
    class Stuck(Synchronous):
        def may_publish(self, view: FlowView) -> bool:
            return False

    with pytest.raises(StalenessError) as caught:
        run(scenario(), candidate(Stuck(Synchronous.Settings())))
    assert "nothing can happen any more, after 0 batches" in str(caught.value)
    assert "Stuck" in caught.value.origin


def test_spans_tell_what_every_instance_and_the_trainer_did() -> None:
    spans: list[Span] = []
    Simulation(scenario(costs={"train_seconds": 3.0}), synchronous(), spans=spans.append).run()
    training = [span for span in spans if not span.instance]
    assert [span.version for span in training] == list(range(12))
    assert all(span.stop - span.start == pytest.approx(3.0) for span in training)
    assert len(spans) - len(training) == 12 * 16
    assert {span.instance for span in spans} == {"", "rollout-0", "rollout-1"}
