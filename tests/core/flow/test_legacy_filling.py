"""New groups under an older version, where slots would idle otherwise and a job asks for it."""

from __future__ import annotations

from headrace.flow import Flow
from headrace_staleness.multi_version import MultiVersion
from support.flow_steps import advance, carry_out, store, ticket


def two_versions(*, legacy_filling: bool) -> Flow:
    """Instance a still has one trajectory of version 0 and three idle slots, b serves version 1 and is full."""
    settings = MultiVersion.Settings(max_staleness=3, outstanding_batches=3, legacy_filling=legacy_filling)
    flow = Flow(policy=MultiVersion(settings), batch_groups=4, group_size=1)
    flow.join("a", slots=4, live_versions=1, versions=(0,))
    for _ in range(4):
        ticket(flow)
    flow.join("b", slots=2, live_versions=1, versions=(0,))
    ticket(flow)
    advance(flow, (0, 1, 2, 4), version=0)
    carry_out(flow)
    assert [ticket(flow).instances for _ in range(3)] == [("b",)] * 3
    return flow


def test_slots_that_idle_on_an_instance_of_an_older_version_stay_idle_unless_asked_otherwise() -> None:
    assert two_versions(legacy_filling=False).next_ticket() is None


def test_slots_that_idle_on_an_instance_of_an_older_version_are_filled_to_the_brim_when_asked() -> None:
    flow = two_versions(legacy_filling=True)
    found = [ticket(flow) for _ in range(3)]
    assert [(group.version, group.instances) for group in found] == [(0, ("a",))] * 3
    assert flow.next_ticket() is None
    flow.generated(5)
    newest = ticket(flow)
    assert (newest.version, newest.instances) == (1, ("b",)), "the newest version comes first"


def test_no_older_version_is_filled_while_a_part_of_the_batch_is_taken() -> None:
    """What was certain to be in the batch would not be any more."""
    flow = two_versions(legacy_filling=True)
    store(flow, 5, version=1)
    assert flow.take_part(now=0.0, ttl=1.0) is not None
    assert ticket(flow).version == 1
    assert flow.next_ticket() is None


def test_a_version_that_the_next_publication_waits_for_is_not_filled() -> None:
    flow = two_versions(legacy_filling=True)
    for _ in range(2):
        for group in range(flow.next_group):
            if group != 3 and flow.knows(group):
                store(flow, group, version=flow.view().version)
        while flow.view().ready.get(flow.view().version, 0) < 4:
            store(flow, ticket(flow).group, version=flow.view().version)
        lease = flow.take_batch(now=0.0, ttl=1.0)
        assert lease is not None
        flow.trained(lease.lease)
        if flow.may_publish():
            flow.published(lease.version + 1)
            carry_out(flow)
    assert flow.view().in_flight == {0: 1}
    assert flow.hosting(0) == ("a",)
    tickets = []
    while (found := flow.next_ticket()) is not None:
        tickets.append(found.version)
    assert 0 not in tickets
