"""Consumers that are given rows ahead of their groups, and stages that are done when their columns are there."""

from __future__ import annotations

import numpy as np

from headrace.flow import Flow, FlowColumns
from headrace.flow.ledger import Ledger
from headrace_staleness.multi_version import MultiVersion

COLUMNS = ("tokens", "reference", "weights")
READS = {"reference": ("tokens",), "advantage": ("tokens",), "train": COLUMNS}
WRITES = {"reference": ("reference",), "advantage": ("weights",)}


def ledger(groups: int = 2) -> Ledger:
    book = Ledger(group_size=2, columns=COLUMNS, consumers=READS, writes=WRITES, by_row=("reference",))
    book.open_many(groups, 0)
    return book


def write(book: Ledger, rows: list[int], column: str, *, tokens: int = 5) -> None:
    assert not book.write(np.array(rows), (column,), nbytes=4, tokens=tokens, unit=1).any()


def test_a_row_is_given_before_others_of_its_group_are_there_and_up_to_a_budget_of_tokens() -> None:
    book = ledger()
    write(book, [0, 3, 2], "tokens")
    assert book.lease("advantage", 9, at_least=1, deadline=1.0).groups.tolist() == [1]  # type: ignore[union-attr]
    lease = book.lease("reference", 9, at_least=1, deadline=1.0, token_budget=10)
    assert lease is not None
    assert book.contents(lease)[0][0].tolist() == [0, 3]
    assert lease.groups.tolist() == [0, 1]
    rest = book.lease("reference", 9, at_least=1, deadline=1.0)
    assert rest is not None
    assert book.contents(rest)[0][0].tolist() == [2]


def test_a_strict_budget_refuses_the_first_row_that_is_longer_and_leaves_it_untried() -> None:
    book = ledger(1)
    write(book, [0], "tokens", tokens=9)
    assert book.lease("reference", 9, at_least=1, deadline=1.0, token_budget=8, strict=True) is None
    lease = book.lease("reference", 9, at_least=1, deadline=1.0, token_budget=9, strict=True)
    assert lease is not None
    assert book.contents(lease)[0].tolist() == [[0], [9], [1]]


def test_a_ledger_that_continues_another_offers_what_was_held_and_not_what_was_done() -> None:
    book = ledger(3)
    write(book, [0, 1, 2, 3, 4], "tokens")
    held = book.lease("reference", 3, deadline=1.0)
    assert held is not None
    write(book, [0], "reference", tokens=0)
    done = book.lease("advantage", 1, deadline=1.0)
    assert done is not None
    book.acknowledge(done.lease)
    again = Ledger(group_size=2, columns=COLUMNS, consumers=READS, writes=WRITES, by_row=("reference",))
    again.restore(book.state())
    assert (again.buffered, again.nbytes, again.awaited) == (5, 0, 6)
    assert [again.ready(consumer) for consumer in READS] == [{0: 4}, {0: 1}, {}]
    for rows, column in (([0, 1, 2, 3, 4], "tokens"), ([0], "reference")):
        assert not again.place(np.array(rows), (column,), nbytes=np.full(len(rows), 4), unit=1).any()
    assert (again.nbytes, again.awaited) == (book.nbytes, 0)
    lease = again.lease("reference", 4, deadline=1.0)
    assert lease is not None
    assert again.contents(lease)[0].tolist() == [[1, 2, 3, 4], [5, 5, 5, 5], [2, 2, 1, 1]]
    assert again.open(0) == 3


def test_a_group_leaves_when_the_last_consumer_that_wants_it_has_written_what_it_adds() -> None:
    """Nobody need acknowledge anything afterwards: there may be nobody left to do so."""
    book = Ledger(group_size=2, columns=("x", "y"), consumers={"fill": ("x",)}, writes={"fill": ("y",)})
    book.open_many(3, 0)
    write(book, [0, 1, 2, 3], "x")
    write(book, [0, 1, 2], "y")
    assert (book.take_left().tolist(), book.buffered, list(book.open_groups())) == ([0], 2, [1, 2])
    assert not book.write_row(3, ("y",), nbytes=4, version=0)
    assert (book.take_left().tolist(), book.buffered, book.nbytes) == ([1], 0, 0)
    assert book.insert(2, 0, ("y",), nbytes=4) == 3
    assert (book.take_left().tolist(), book.buffered, list(book.open_groups())) == ([3, 4], 0, [2])


def test_what_is_put_with_all_that_a_consumer_adds_is_never_given_to_it() -> None:
    book = Ledger(
        group_size=1, columns=("x", "y"), consumers={"fill": ("x",), "train": ("x", "y")}, writes={"fill": ("y",)}
    )
    book.insert(2, 0, ("y",), nbytes=4)
    write(book, [0, 1], "x")
    assert book.ready("fill") == {}
    assert book.ready("train") == {0: 2}


def test_what_a_lost_stage_had_written_is_not_given_out_again() -> None:
    book = ledger()
    write(book, [0, 1, 2, 3], "tokens")
    lease = book.lease("reference", 9, at_least=1, deadline=1.0)
    assert lease is not None
    write(book, [1, 2], "reference", tokens=0)
    book.expire(2.0)
    again = book.lease("reference", 9, at_least=1, deadline=9.0)
    assert again is not None
    assert book.contents(again)[0][0].tolist() == [0, 3]


def test_a_group_leaves_when_it_is_trained_though_a_stage_still_holds_its_lease() -> None:
    book = ledger(1)
    write(book, [0, 1], "tokens")
    held = [book.lease(consumer, 9, at_least=1, deadline=1.0) for consumer in ("reference", "advantage")]
    write(book, [0, 1], "reference", tokens=0)
    write(book, [0, 1], "weights", tokens=0)
    trained = book.lease("train", 1, deadline=1.0)
    assert trained is not None
    assert book.acknowledge(trained.lease)[1].tolist() == [0]
    for lease in held:
        assert lease is not None
        assert book.acknowledge(lease.lease)[1].tolist() == []
    assert (book.buffered, book.nbytes) == (0, 0)


def test_a_flow_goes_on_with_groups_that_still_lack_columns_and_counts_them_in_flight() -> None:
    """Their version must not be passed over: they would be too old when they are complete."""
    columns = FlowColumns(all=COLUMNS, first=("tokens",), consumers=READS, writes=WRITES, by_row=("reference",))
    policy = MultiVersion(MultiVersion.Settings(max_staleness=1))
    flow = Flow(policy=policy, batch_groups=1, group_size=2, columns=columns)
    flow.join("a", slots=100, live_versions=2, versions=(0,))
    ticket = flow.next_ticket()
    assert ticket is not None
    for row in ticket.trajectories:
        assert flow.stored(row, version=0, tokens=5, nbytes=4)
    rows, nbytes = np.array([0, 1]), np.array([4, 4])
    flow.added(rows[:1], ("reference",), nbytes=nbytes[:1], unit=1)
    state = flow.state()
    assert [kept.group for kept in state.stored] == [0]
    again = Flow(policy=policy, batch_groups=1, group_size=2, columns=columns, state=state)
    assert again.view().in_flight == {0: 1}
    assert again.take_batch(now=0.0, ttl=1.0) is None
    assert not again.ledger.place(rows, ("tokens",), nbytes=nbytes, unit=1).any()
    assert again.nbytes == 8, "of what comes back; what a stage had added it adds again"
    again.added(rows, ("reference",), nbytes=nbytes, unit=1)
    again.added(rows, ("weights",), nbytes=nbytes, unit=1)
    assert again.view().in_flight == {}
    batch = again.take_batch(now=0.0, ttl=1.0)
    assert batch is not None
    assert batch.groups == (0,)
