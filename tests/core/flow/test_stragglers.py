"""Stragglers of the oldest version are left alone where a job asks for it: their instances get new work last."""

from __future__ import annotations

from collections import Counter

from headrace.flow import Flow
from headrace_staleness.multi_version import MultiVersion
from support.flow_steps import advance, carry_out, store, ticket

SLOTS = 4


def one_straggler(*, spare_stragglers: bool) -> Flow:
    """Of version 0 a trajectory is left on instance a; a, b and c host version 1."""
    policy = MultiVersion(MultiVersion.Settings(max_staleness=3, outstanding_batches=3))
    flow = Flow(policy=policy, batch_groups=5, group_size=1, lookahead=1.0, spare_stragglers=spare_stragglers)
    for name in "abc":
        flow.join(name, slots=SLOTS, live_versions=2, versions=(0,))
    assert [ticket(flow).instances for _ in range(6)] == [(name,) for name in "abcabc"]
    advance(flow, (1, 2, 3, 4, 5), version=0)
    carry_out(flow)
    return flow


def started(flow: Flow) -> Counter[str]:
    found = Counter[str]()
    while (group := flow.next_ticket()) is not None:
        found[group.instances[0]] += 1
    return found


def test_an_instance_with_a_straggler_gets_new_work_last() -> None:
    flow = one_straggler(spare_stragglers=True)
    assert [ticket(flow).instances for _ in range(8)] == [(name,) for name in "bcbcbcbc"]
    assert started(flow) == {"a": 3}, "rather than let slots idle"
    flow = one_straggler(spare_stragglers=False)
    assert Counter(ticket(flow).instances[0] for _ in range(8)) == {"a": 2, "b": 3, "c": 3}


def test_it_gets_work_as_others_do_when_the_straggler_is_done() -> None:
    flow = one_straggler(spare_stragglers=True)
    assert [ticket(flow).instances for _ in range(2)] == [("b",), ("c",)]
    store(flow, 0, version=0)
    assert ticket(flow).instances == ("a",)


def test_all_are_alike_when_all_have_stragglers() -> None:
    policy = MultiVersion(MultiVersion.Settings(max_staleness=3, outstanding_batches=3))
    flow = Flow(policy=policy, batch_groups=3, group_size=1, lookahead=1.0, spare_stragglers=True)
    for name in "abc":
        flow.join(name, slots=SLOTS, live_versions=2, versions=(0,))
    for _ in range(6):
        ticket(flow)
    advance(flow, (0, 1, 2), version=0)
    carry_out(flow)
    assert started(flow) == {"a": 2, "b": 2, "c": 2}


def test_the_next_version_is_spared_when_the_oldest_is_done() -> None:
    flow = one_straggler(spare_stragglers=True)
    later = ticket(flow)
    assert later.instances == ("b",)
    for _ in range(4):
        group = ticket(flow)
        store(flow, group.group, version=1)
    store(flow, 0, version=0)
    batch = flow.take_batch(now=0.0, ttl=1.0)
    assert batch is not None
    flow.trained(batch.lease)
    flow.published(2)
    carry_out(flow)
    assert flow.view().in_flight == {1: 1}
    assert [ticket(flow).instances for _ in range(4)] == [("a",), ("c",), ("a",), ("c",)]
