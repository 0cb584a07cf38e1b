"""Evaluation: held-out prompts answered by a pinned version, in the slots that training's trajectories want too.

Invariant: a version stays pinned until its last answer, as in :mod:`headrace.run.evaluation`.
"""

from __future__ import annotations

from collections import deque

from headrace.flow import Flow
from headrace.simulate.decoding import Request
from headrace.simulate.fleet import Fleet
from headrace.simulate.lengths import Trajectories
from headrace.simulate.scenario import Scenario


class Evaluation:
    """Its requests have negative numbers, which no trajectory has."""

    def __init__(self, flow: Flow, fleet: Fleet, scenario: Scenario) -> None:
        self._flow = flow
        self._fleet = fleet
        self._scenario = scenario
        self._lengths: Trajectories = scenario.trajectories.apart("held-out")
        self._waiting: deque[int] = deque()
        self._version: dict[int, int] = {}
        """Request → version, until it is answered."""
        self._open: dict[int, int] = {}
        """Version → requests without an answer."""
        self._next = -1

    def after_batch(self, step: int, version: int) -> None:
        """The batch of this number is trained, and gave ``version``."""
        every, answers = self._scenario.evaluation_every, self._scenario.evaluation_answers
        if not every or (step + 1) % every:
            return
        self._flow.pin(version)
        self._open[version] = answers
        for request in range(self._next, self._next - answers, -1):
            self._version[request] = version
            self._waiting.append(request)
        self._next -= answers

    def go_on(self) -> None:
        """Ask instances that host the version, in turn."""
        while self._waiting:
            hosting = self._flow.hosting(self._version[self._waiting[0]])
            if not hosting:
                return
            request = self._waiting.popleft()
            self._fleet.engine(hosting[-request % len(hosting)]).submit(
                Request(request, self._scenario.costs.prompt_tokens, self._lengths.tokens(-request))
            )

    def answered(self, request: int) -> None:
        """An answer is complete; after the last, the version may be retired."""
        version = self._version.pop(request)
        self._open[version] -= 1
        if not self._open[version]:
            del self._open[version]
            self._flow.unpin(version)

    def lost(self, requests: list[int]) -> None:
        """An instance failed with these; those of an evaluation are asked again."""
        self._waiting.extend(request for request in requests if request < 0)
