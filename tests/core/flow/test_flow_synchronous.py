"""``max_staleness = 0`` is the synchronous run: all policies answer every question alike, on any schedule."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.contract import StalenessPolicy
from headrace.flow import Flow
from headrace_staleness.multi_version import MultiVersion
from headrace_staleness.synchronous import Synchronous
from headrace_staleness.windowed import Windowed


def run(policy: StalenessPolicy, *, seed: int, events: int, batch_groups: int, group_size: int) -> list[Any]:
    """Every answer of a flow whose events are drawn from what it answered before."""
    flow = Flow(policy=policy, batch_groups=batch_groups, group_size=group_size)
    random, answers = Random(seed), []
    unfinished: list[int] = []
    joined: list[str] = []
    for event in range(events):
        match random.randrange(9):
            case 0 | 1:
                ticket = flow.next_ticket()
                answers.append(ticket)
                unfinished += ticket.trajectories if ticket else ()
            case 2 | 3 if unfinished:
                trajectory = unfinished.pop(random.randrange(len(unfinished)))
                version = flow.view().version
                answers.append(flow.stored(trajectory, version=version, tokens=1, nbytes=1))
            case 4:
                lease = flow.take_batch(now=0.0, ttl=1.0)
                answers.append(lease)
                if lease is not None and random.random() < 0.2:
                    flow.release(lease.lease)
                elif lease is not None:
                    answers.append(flow.trained(lease.lease, applied=random.random() < 0.8))
            case 5 if flow.may_publish():
                flow.published(flow.view().version + 1)
                answers.extend(flow.retirable())
            case 6 if unfinished and random.random() < 0.2:
                group = random.choice(unfinished) // group_size
                dropped = flow.drop_group(group, "failed")
                answers.append(dropped)
                unfinished = [trajectory for trajectory in unfinished if trajectory not in dropped]
            case 7 if not joined or random.random() < 0.1:
                joined.append(f"instance-{event}")
                flow.join(joined[-1], slots=2, live_versions=random.randint(1, 2), versions=())
            case 8 if len(joined) > 1 and random.random() < 0.1:
                answers.append(flow.leave(joined.pop(random.randrange(len(joined)))))
        for switch in flow.switches():
            answers.append(switch)
            for version in switch.retire:
                flow.retired_on(switch.instance, version)
            if switch.load is not None:
                flow.committed(switch.instance, switch.load)
        answers.append([flow.place_again(trajectory) for trajectory in flow.unplaced()])
        answers.append((flow.view(), flow.counts(), flow.may_publish()))
    return answers


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32), events=st.integers(1, 200), batch_groups=st.integers(1, 4), group_size=st.integers(1, 3)
)
def test_a_policy_with_a_bound_of_zero_is_the_synchronous_policy(
    seed: int, events: int, batch_groups: int, group_size: int
) -> None:
    how: dict[str, Any] = {"seed": seed, "events": events, "batch_groups": batch_groups, "group_size": group_size}
    synchronous = run(Synchronous(Synchronous.Settings()), **how)
    assert run(MultiVersion(MultiVersion.Settings(max_staleness=0)), **how) == synchronous
    assert run(Windowed(Windowed.Settings(max_staleness=0)), **how) == synchronous


def test_the_schedules_compared_get_somewhere() -> None:
    answers = run(Synchronous(Synchronous.Settings()), seed=1, events=600, batch_groups=2, group_size=2)
    view, counts, _ = answers[-1]
    assert view.version > 5
    assert counts.trained > 20
    assert sum(counts.dropped.values()) > 0
