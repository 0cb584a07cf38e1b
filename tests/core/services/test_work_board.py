"""Who waits for work, and who has which item: nothing is lost with a worker, nothing is held by two."""

from __future__ import annotations

from headrace.services.board import WorkBoard
from headrace.services.messages import WorkItem, item_key


def item(group: int, kind: str = "rollout") -> WorkItem:
    return WorkItem(
        kind=kind, group=group, version=0, split="train", members=[], max_new_tokens=1, temperature=1.0, greedy=False
    )


def nothing() -> None:
    return None


async def test_queued_items_go_before_made_ones_and_to_workers_in_turn() -> None:
    board, made = WorkBoard(), iter([item(1), item(2)])
    first, second, third = board.wait("a"), board.wait("b"), board.wait("c")
    board.put(item(0, "evaluation"))
    board.give(lambda: next(made, None))
    assert [first.result().kind, second.result().group, third.result().group] == ["evaluation", 1, 2]


async def test_a_place_that_was_given_up_gets_nothing() -> None:
    board = WorkBoard()
    left, stays = board.wait("a"), board.wait("b")
    left.cancel()
    board.put(item(0))
    board.give(nothing)
    assert stays.result().group == 0


async def test_who_finds_nothing_keeps_the_place() -> None:
    board = WorkBoard()
    waiting = board.wait("a")
    board.give(nothing)
    assert not waiting.done()
    board.give(lambda: item(0))
    assert waiting.result().group == 0


async def test_a_lost_worker_s_items_are_given_back_once_and_its_waiting_ends() -> None:
    board = WorkBoard()
    held, waiting = board.wait("a"), None
    board.put(item(0))
    board.give(nothing)
    waiting = board.wait("a")
    assert board.lost("a") == [held.result()]
    assert board.lost("a") == []
    assert waiting.cancelled()
    assert board.is_lost("a")
    assert board.done(item_key(0, evaluation=False)) is None


async def test_a_request_of_a_lost_worker_that_was_on_its_way_is_given_nothing() -> None:
    board = WorkBoard()
    board.lost("a")
    late, alive = board.wait("a"), board.wait("b")
    board.put(item(0))
    board.give(nothing)
    assert late.cancelled()
    assert alive.result().group == 0


async def test_a_report_ends_the_holding_and_only_the_first_counts() -> None:
    board = WorkBoard()
    board.wait("a")
    board.put(item(3))
    board.give(nothing)
    done = board.done(item_key(3, evaluation=False))
    assert done is not None
    assert done.group == 3
    assert board.done(item_key(3, evaluation=False)) is None
    assert board.lost("a") == []


async def test_what_nobody_wants_leaves_the_queue_and_its_holder() -> None:
    board = WorkBoard()
    board.wait("a")
    board.put(item(0))
    board.give(nothing)
    board.put(item(1))
    board.put(item(1, "evaluation"))
    board.forget([item_key(0, evaluation=False), item_key(1, evaluation=False)])
    assert board.lost("a") == []
    waiting = board.wait("b")
    board.give(nothing)
    assert waiting.result().kind == "evaluation"
