"""Moves on the virtual clock: a request leaves its instance, travels, and goes on on another one.

It owes the flow what :mod:`headrace.services.rebalancer` owes it in a real run. Invariant: a trajectory makes one move
at a time, and is lost only with the instance that it comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import simpy

from headrace.config import SimulationConfig
from headrace.flow import Flow, Move
from headrace.simulate.decoding import Request
from headrace.simulate.fleet import Fleet


@dataclass(frozen=True, slots=True, eq=False)
class _Journey:
    move: Move
    request: Request


class Moving:
    """``arrived(trajectory, source)``: told of each trajectory that goes on elsewhere. ``done``: how many did.
    ``prefilled_again``: tokens whose KV was computed once more for it."""

    def __init__(
        self,
        environment: simpy.Environment,
        flow: Flow,
        fleet: Fleet,
        costs: SimulationConfig,
        *,
        arrived: Callable[[int, str], None],
    ) -> None:
        self.done = 0
        self.prefilled_again = 0.0
        self._environment = environment
        self._flow = flow
        self._fleet = fleet
        self._costs = costs
        self._arrived = arrived
        self._wanted: tuple[Move, ...] = ()
        """What the flow said last."""
        self._journeys: dict[int, _Journey] = {}

    def begin(self) -> None:
        """Carry out what the flow wants now and nobody is at yet."""
        moves = self._flow.moves()
        if moves is self._wanted:
            return
        self._wanted = moves
        for move in moves:
            if move.trajectory not in self._journeys:
                self._begin(move)

    def _begin(self, move: Move) -> None:
        request = self._fleet.engine(move.source).hand_over(move.trajectory)
        if request is None:  # it is on its way there, or done just now
            self._flow.stays(move.trajectory)
            return
        seconds = self._costs.move_seconds
        if move.with_state:
            seconds += self._costs.move_seconds_per_token * request.cached
        journey = self._journeys[move.trajectory] = _Journey(move, request)
        timeout = self._environment.timeout(seconds)
        assert timeout.callbacks is not None, "it has just been made"
        timeout.callbacks.append(lambda _: self._arrive(journey))

    def _arrive(self, journey: _Journey) -> None:
        move, request = journey.move, journey.request
        if self._journeys.get(move.trajectory) is not journey:
            return  # an instance was lost meanwhile
        del self._journeys[move.trajectory]
        if not self._flow.moved(move.trajectory):
            self._go_back(journey)
            return
        if not move.with_state:
            self.prefilled_again += request.cached
            request = request._replace(cached=0.0)
        self.done += 1
        self._arrived(move.trajectory, move.source)
        self._fleet.engine(move.target).submit(request)

    def _go_back(self, journey: _Journey) -> None:
        """It goes on where it was, unless its group was dropped."""
        move = journey.move
        if self._flow.instance_of(move.trajectory) == move.source:
            self._fleet.engine(move.source).submit(journey.request)

    def lost(self, instance: str) -> None:
        """An instance failed. What was to come to it goes on where it was; what was to leave it starts anew."""
        for journey in list(self._journeys.values()):
            if instance in (journey.move.source, journey.move.target):
                del self._journeys[journey.move.trajectory]
                if instance != journey.move.source:
                    self._go_back(journey)
