"""Which group starts next where it may be chosen: the longest right after a publication, and each of them once."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from headrace.flow import Flow
from headrace.flow.order import LongestFirst
from headrace_staleness.multi_version import MultiVersion
from headrace_staleness.synchronous import Synchronous
from support.flow_steps import carry_out, ticket

PROMPTS = 8
SHORT, LONG = 10, 80


def prompt(group: int) -> int:
    return group % PROMPTS


def flow_of(*, batch_groups: int = PROMPTS, waits: str = "batch", slots: int = 100) -> Flow:
    policy = MultiVersion(MultiVersion.Settings(max_staleness=2, outstanding_batches=2, waits=waits))
    flow = Flow(policy=policy, batch_groups=batch_groups, group_size=1, prompt=prompt)
    flow.join("a", slots=slots, live_versions=100, versions=(0,))
    return flow


def store(flow: Flow, group: int, tokens: int) -> None:
    version = flow.ledger.version(group)
    assert flow.stored(group, version=version, tokens=tokens, nbytes=1)


def start(flow: Flow, count: int) -> list[int]:
    return [ticket(flow).group for _ in range(count)]


def train(flow: Flow) -> Callable[[], None]:
    """Take a batch and train it; returns what publishes the next version."""
    lease = flow.take_batch(now=0.0, ttl=1.0)
    assert lease is not None
    flow.trained(lease.lease)

    def publish() -> None:
        flow.published(lease.version + 1)
        carry_out(flow)

    return publish


def begun(tokens: dict[int, int]) -> tuple[Flow, Callable[[], None]]:
    """Each prompt was answered once, with so many tokens (10 unless said), and all that is outstanding is trained but
    for the publication of version 1."""
    flow = flow_of()
    for group in start(flow, PROMPTS):
        store(flow, group, tokens.get(prompt(group), SHORT))
    return flow, train(flow)


def test_groups_start_as_they_come_while_nothing_is_known() -> None:
    flow = flow_of()
    assert start(flow, 2 * PROMPTS) == list(range(2 * PROMPTS))


def test_after_a_publication_the_longest_start_first() -> None:
    flow, publish = begun({2: LONG, 5: LONG + 1})
    publish()
    assert [prompt(group) for group in start(flow, PROMPTS)] == [5, 2, 0, 1, 3, 4, 6, 7]


def test_a_group_that_will_take_long_is_queued_behind_no_other_though_it_was_put_off_before() -> None:
    flow = flow_of(slots=1)
    for group in range(PROMPTS):
        assert start(flow, 1) == [group]
        store(flow, group, LONG if prompt(group) == 2 else SHORT)
    publish = train(flow)
    (late,) = start(flow, 1)
    publish()
    assert flow.next_ticket() is None, "others could wait in the queue of the one slot"
    store(flow, late, SHORT)
    assert list(map(prompt, start(flow, 1))) == [2]


def test_a_prompt_that_nobody_has_answered_is_taken_to_be_average() -> None:
    flow = flow_of(batch_groups=4)
    for group in start(flow, 4):
        store(flow, group, LONG if group == 1 else SHORT)
    publish = train(flow)
    publish()
    assert start(flow, 4) == [4, 5, 6, 7], "other prompts, all unknown"
    for group in range(4, 8):
        store(flow, group, SHORT)
    train(flow)()
    assert [prompt(group) for group in start(flow, 4)] == [1, 0, 2, 3]


def test_what_takes_longest_waits_for_a_publication_that_is_about_to_come() -> None:
    flow, publish = begun({2: LONG, 5: LONG + 1})
    first = [prompt(group) for group in start(flow, PROMPTS - 1)]
    assert first == [2, 0, 1, 3, 4, 6, 7], "one in eight waits"
    publish()
    assert [prompt(group) for group in start(flow, 2)] == [5, 5], "then the longest of the next block"


def test_the_last_answers_to_a_prompt_count_most() -> None:
    flow, publish = begun({2: LONG, 5: LONG + 1})
    publish()
    for group in start(flow, PROMPTS):
        store(flow, group, SHORT if prompt(group) == 5 else LONG if prompt(group) == 2 else SHORT)
    train(flow)()
    assert [prompt(group) for group in start(flow, 2)] == [2, 5]


def test_lockstep_takes_groups_as_they_come() -> None:
    flow = Flow(policy=Synchronous(Synchronous.Settings()), batch_groups=2, group_size=1, prompt=prompt)
    flow.join("a", slots=4, live_versions=1, versions=(0,))
    assert start(flow, 2) == [0, 1]
    assert flow.next_group == 2, "none is reserved"


def test_what_was_reserved_and_not_started_is_started_by_a_flow_that_goes_on() -> None:
    flow, publish = begun({2: LONG, 5: LONG + 1})
    publish()
    started = start(flow, 3)
    state = flow.state()
    again = Flow(
        policy=MultiVersion(MultiVersion.Settings(max_staleness=2)),
        batch_groups=PROMPTS,
        group_size=1,
        state=state,
        prompt=prompt,
    )
    again.join("a", slots=100, live_versions=100, versions=(state.version,))
    assert sorted(start(again, PROMPTS)) == list(range(PROMPTS, 2 * PROMPTS))
    assert set(started) <= set(range(PROMPTS, 2 * PROMPTS)), (
        "what was in flight begins anew, with the rest of its block"
    )


@given(seed=st.integers(0, 2**32), groups=st.integers(1, 20))
def test_every_group_starts_once_and_what_a_publication_left_comes_before_any_other(seed: int, groups: int) -> None:
    random = Random(seed)
    world = _Alone(groups)
    for _ in range(12):
        for late in (False, True):
            world.start(random, late=late, count=random.randint(0, groups))
        waiting = world.reserved
        world.order.published()
        assert set(world.start(random, late=random.random() < 0.5, count=len(waiting))) == waiting


class _Alone:
    """An order on its own, and all that it gave."""

    def __init__(self, groups: int) -> None:
        flow = flow_of(batch_groups=groups)
        self.ledger = flow.ledger
        self.order = LongestFirst(self.ledger, prompt=prompt, groups=groups)
        self.given: set[int] = set()

    @property
    def reserved(self) -> set[int]:
        return set(self.ledger.reserved)

    def start(self, random: Random, *, late: bool, count: int) -> list[int]:
        found = []
        for _ in range(count):
            group = self.order.next(late=late)
            assert group in self.reserved
            assert self.ledger.open(0, group) == group
            assert group not in self.given
            self.given.add(group)
            found.append(group)
            if random.random() < 0.7:
                tokens = random.choice([SHORT, LONG, 3 * LONG])
                self.ledger.write_row(group, ("row",), nbytes=1, tokens=tokens, version=0)
                self.order.observed(group)
        return found
