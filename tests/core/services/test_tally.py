"""What the controller counts between two training batches."""

from __future__ import annotations

from dataclasses import fields

import msgspec

from headrace.services.controller import Controller
from headrace.services.node_messages import Heartbeat
from headrace.services.tally import Tally
from support.desk import Desk, loaded, switched


class Heard:
    def heartbeat(self, beat: Heartbeat) -> None:
        return


async def test_what_instances_parked_is_added_up() -> None:
    desk = Desk()
    controller = Controller(emit=desk.emit, fleet=desk.fleet, ledger=desk.ledger, notice=lambda text: None)
    controller.supervisor = Heard()  # type: ignore[assignment]  # heartbeats only
    for process, parked in [("a.0", 2), ("b.0", 3), ("a.0", 0)]:
        await controller.heartbeat(Heartbeat(node=process, loop_lag=0.0, parked=parked))
    assert controller.tally.parked == 5


def test_of_the_parts_of_an_update_the_longest_is_kept_until_it_is_read() -> None:
    tally = Tally()
    for seconds in (2.0, 3.0, 1.0):
        tally.loaded(msgspec.structs.replace(loaded(1), transfer_seconds=seconds, nbytes=int(10 * seconds)))
        parts = {f"{part}_seconds": seconds for part in ("pause", "resume", "stopped")}
        tally.switched(msgspec.structs.replace(switched((0, 0, 4), prefilled_tokens=6), **parts))
    assert (tally.transfer_seconds, tally.pause_seconds, tally.resume_seconds, tally.stopped_seconds) == (3.0,) * 4
    assert tally.transfer_bytes == 30
    assert (tally.interrupted, tally.prefilled_again) == (3, 18)
    tally.clear()
    assert {field.name: getattr(tally, field.name) for field in fields(Tally)} == {
        field.name: getattr(Tally(), field.name) for field in fields(Tally)
    }
