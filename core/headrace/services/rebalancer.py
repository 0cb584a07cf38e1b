"""The moves that ``flow`` decides, carried out between rollout instances in the background.

Invariant: a trajectory makes one move at a time. One that came to nothing leaves it where it was; what becomes of a
trajectory whose instance is lost meanwhile is decided where the loss is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.errors import HeadraceError
from headrace.flow import Flow, Move
from headrace.services.attempts import Attempts
from headrace.services.fleet import Fleet, Instance
from headrace.services.moves import CARRY_DEADLINE, OFFER_DEADLINE
from headrace.services.request_messages import MoveCall, Moved
from headrace.services.tally import Tally

MOVE_DEADLINE = OFFER_DEADLINE + CARRY_DEADLINE + 20.0


class Rebalancer:
    """Of one phase. ``arrived(trajectory, source address, target)`` is called when a trajectory is known to go on
    elsewhere."""

    def __init__(
        self,
        flow: Flow,
        *,
        fleet: Fleet,
        attempts: Attempts,
        tally: Tally,
        emit: Callable[..., Any],
        arrived: Callable[[int, str, str], None],
    ) -> None:
        self._flow = flow
        self._fleet = fleet
        self._attempts = attempts
        self._tally = tally
        self._emit = emit
        self._arrived = arrived
        self._moving: set[int] = set()

    def begin_moves(self) -> None:
        """Carry out what ``flow`` wants now and nobody is at yet."""
        for move in self._flow.moves():
            if move.trajectory not in self._moving:
                self._moving.add(move.trajectory)
                attempt = self._attempts.current(move.trajectory)
                # Looked up now: either may be lost before the work begins.
                source, target = self._fleet.get(move.source), self._fleet.get(move.target)
                self._fleet.spawn(self._carry_out(move, attempt, source, target), f"move trajectory {move.trajectory}")

    async def _carry_out(self, move: Move, attempt: int, source: Instance, target: Instance) -> None:
        call = MoveCall(trajectory=move.trajectory, attempt=attempt, version=move.version, target=target.address)
        moved: Moved | None = None
        try:
            moved = await source.client.call(
                "move",
                call,
                reply=Moved,
                deadline=MOVE_DEADLINE,
                awaiting=f"{move.source} to send trajectory {move.trajectory} on to {move.target}",
            )
        except HeadraceError:  # it goes on at the source, which is what matters; how often is counted
            pass
        finally:
            self._moving.discard(move.trajectory)
        if self._fleet.has(source) and self._fleet.has(target):
            self._done(move, attempt, moved, source.address)
        else:
            self._flow.stays(move.trajectory)
        self._fleet.changed()

    def _done(self, move: Move, attempt: int, moved: Moved | None, left: str) -> None:
        """Both instances are there still."""
        trajectory = move.trajectory
        if moved is None:
            self._tally.failed_moves += 1
            self._flow.stays(trajectory)
        elif not self._flow.instance_of(trajectory):  # it has finished already: old news, for the log alone
            self._tell(move, attempt, moved)
        elif self._attempts.current(trajectory) != attempt:  # it is tried anew, where it is placed now
            self._flow.stays(trajectory)
        elif self._flow.moved(trajectory):
            self._arrived(trajectory, left, move.target)
            self._tell(move, attempt, moved)

    def _tell(self, move: Move, attempt: int, moved: Moved) -> None:
        self._tally.moves += 1
        self._tally.prefilled_again += moved.prefilled_tokens
        self._emit(
            "trajectory_moved",
            trajectory=move.trajectory,
            group=move.trajectory // self._flow.group_size,
            version=move.version,
            source=move.source,
            target=move.target,
            attempt=attempt,
            tokens=moved.tokens,
            prefilled_tokens=moved.prefilled_tokens,
            nbytes=moved.nbytes,
        )
