"""Steps that tests of the flow take again and again."""

from __future__ import annotations

from headrace.flow import Flow, Ticket


def ticket(flow: Flow) -> Ticket:
    found = flow.next_ticket()
    assert found is not None
    return found


def store(flow: Flow, group: int, *, version: int) -> None:
    for trajectory in range(group * flow.group_size, (group + 1) * flow.group_size):
        assert flow.stored(trajectory, version=version, tokens=1, nbytes=1)


def advance(flow: Flow, groups: tuple[int, ...], *, version: int) -> None:
    """Train a batch of these groups and publish the next version."""
    for group in groups:
        store(flow, group, version=version)
    lease = flow.take_batch(now=0.0, ttl=1.0)
    assert lease is not None
    flow.trained(lease.lease)
    flow.published(lease.version + 1)


def carry_out(flow: Flow) -> None:
    for switch in flow.switches():
        for version in switch.retire:
            flow.retired_on(switch.instance, version)
        if switch.load is not None:
            flow.committed(switch.instance, switch.load)
