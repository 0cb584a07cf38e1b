"""What environment workers are told, and that nobody waits for one that is lost."""

from __future__ import annotations

import asyncio

import pytest

from headrace.errors import WireError
from headrace.services.messages import CancelGroups
from headrace.services.workers import Workers
from support.desk import Peer, turns

CANCEL = CancelGroups(groups=[1])


def two() -> tuple[Workers, dict[str, Peer]]:
    peers = {address: Peer(address) for address in ("a.0", "b.0")}
    workers = Workers(peers.__getitem__)  # type: ignore[arg-type]  # calls only
    for address in peers:
        workers.add(address.partition(".")[0], address)
    return workers, peers


async def test_telling_returns_when_every_worker_has_heard() -> None:
    workers, peers = two()
    telling = asyncio.ensure_future(workers.tell("cancel", CANCEL, awaiting="to stop"))
    await turns()
    peers["a.0"].answer("cancel")
    await turns()
    assert not telling.done()
    peers["b.0"].answer("cancel")
    await telling


async def test_nobody_waits_for_a_worker_that_is_lost_while_it_is_told() -> None:
    workers, peers = two()
    telling = asyncio.ensure_future(workers.tell("cancel", CANCEL, awaiting="to stop"))
    await turns()
    peers["a.0"].answer("cancel")
    await workers.lost("b")
    await telling


async def test_a_worker_that_is_lost_before_its_turn_to_be_told_is_skipped() -> None:
    workers, peers = two()
    telling = asyncio.ensure_future(workers.tell("cancel", CANCEL, awaiting="to stop"))
    losing = asyncio.ensure_future(workers.lost("b"))
    await asyncio.sleep(0)  # both have begun; the words to each worker have not
    await losing
    await turns()
    peers["a.0"].answer("cancel")
    await telling


async def test_a_worker_that_does_not_answer_and_is_not_lost_is_an_error() -> None:
    workers, peers = two()
    telling = asyncio.ensure_future(workers.tell("cancel", CANCEL, awaiting="to stop"))
    await turns()
    peers["a.0"].answer("cancel")
    peers["b.0"].answer("cancel", WireError("b sent nothing"))
    with pytest.raises(WireError, match="b sent nothing"):
        await telling
