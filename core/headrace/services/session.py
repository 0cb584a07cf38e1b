"""What one episode may ask of its instance, and what happens when that instance is lost in the middle.

Invariant: every call of an episode carries the ticket's version and seed, wherever it is answered; a call whose
instance is gone is made again at the place that the controller names. It goes on there when it had moved there, and
from its prompt else.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.contract import Array, Completion, GenerationRequest, Sampling
from headrace.errors import WireError
from headrace.services.messages import Member, PlaceCall, Placement, WorkItem
from headrace.services.own_time import OwnTime
from headrace.services.request_messages import GenerateCall, Generated, WithdrawCall
from headrace.wire import Client

GENERATE_DEADLINE = 600.0
PLACE_DEADLINE = 600.0
"""An instance that is started again may have a large model to load."""


class Instances:
    """The rollout instances as a worker knows them, by address."""

    def __init__(self, *, connect: Callable[[str], Client]) -> None:
        self._connect = connect
        self._clients: dict[str, Client] = {}
        self._lost: set[str] = set()

    def client(self, address: str) -> Client:
        """A client of an instance that :meth:`is_lost` does not know."""
        if address not in self._clients:
            self._clients[address] = self._connect(address)
        return self._clients[address]

    def is_lost(self, address: str) -> bool:
        """Whether nobody will answer there (any more); "" is no place."""
        return not address or address in self._lost

    async def lost(self, address: str) -> None:
        """An instance is gone: calls to it end with WireError."""
        self._lost.add(address)
        if (client := self._clients.pop(address, None)) is not None:
            await client.close()

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()


class Session:
    """The generation session of one episode (:class:`headrace.contract.Session`)."""

    def __init__(
        self,
        instances: Instances,
        controller: Client,
        *,
        worker: str,
        item: WorkItem,
        member: Member,
        own_time: OwnTime,
    ) -> None:
        self._instances = instances
        self._controller = controller
        self._worker = worker
        self._item = item
        self._member = member
        self.own_time = own_time
        self._place = Placement(instance=member.instance, attempt=member.attempt)
        self._calls = 0

    async def generate(
        self, prompt: Array, *, stop_token_ids: tuple[int, ...] = (), max_new_tokens: int | None = None
    ) -> Completion:
        item = self._item
        sampling = Sampling(
            max_new_tokens=item.max_new_tokens if max_new_tokens is None else min(max_new_tokens, item.max_new_tokens),
            temperature=item.temperature,
            greedy=item.greedy or self._member.greedy,
            stop_token_ids=stop_token_ids,
            seed=(self._member.seed + self._calls) % 2**63,
        )
        number, self._calls = self._calls, self._calls + 1
        with self.own_time.waits_for_tokens():
            return await self._generate(np.asarray(prompt, dtype=np.int32), sampling, number)

    async def _generate(self, prompt: Array, sampling: Sampling, number: int) -> Completion:
        while True:
            address = self._place.instance
            if self._instances.is_lost(address):
                await self._move()
                continue
            try:
                generated = await self._instances.client(address).call(
                    "generate",
                    self._call(prompt, sampling, number),
                    reply=Generated,
                    deadline=GENERATE_DEADLINE,
                    awaiting=f"trajectory {self._member.trajectory} from {address}",
                )
            except WireError:
                if not self._instances.is_lost(address):
                    raise
                continue
            if generated.completion is not None:
                return generated.completion
            self._place = Placement(instance=generated.moved, attempt=self._place.attempt)

    def _call(self, prompt: Array, sampling: Sampling, number: int) -> GenerateCall:
        item, member = self._item, self._member
        in_cohort = self._place.instance == member.instance
        return GenerateCall(
            request=GenerationRequest(
                request_id=f"{item.kind}-{item.version:08d}-{member.trajectory:012d}-{number:04d}"
                f"-{self._place.attempt:02d}",
                prompt=prompt,
                sampling=sampling,
                version=item.version,
            ),
            trajectory=member.trajectory,
            attempt=self._place.attempt,
            movable=item.kind == "rollout" and not (in_cohort and member.cohort),
            cohort=member.cohort if in_cohort else "",
            cohort_size=member.cohort_size if in_cohort else 0,
        )

    async def _move(self) -> None:
        item, member = self._item, self._member
        self._place = await self._controller.call(
            "place",
            PlaceCall(
                worker=self._worker,
                version=item.version,
                group=item.group,
                trajectory=member.trajectory,
                instance=self._place.instance,
                attempt=self._place.attempt,
                evaluation=item.kind == "evaluation",
            ),
            reply=Placement,
            deadline=PLACE_DEADLINE,
            awaiting=f"another instance with version {item.version} for trajectory {member.trajectory}",
        )

    async def withdraw(self) -> None:
        """The episode ended without a word to its instance: its cohort must not wait for it."""
        member = self._member
        if not member.cohort or self._calls or self._instances.is_lost(member.instance):
            return
        try:
            await self._instances.client(member.instance).call(
                "withdraw",
                WithdrawCall(cohort=member.cohort, cohort_size=member.cohort_size, trajectory=member.trajectory),
                deadline=GENERATE_DEADLINE,
                awaiting=f"{member.instance} to leave trajectory {member.trajectory} out",
            )
        except WireError:
            if not self._instances.is_lost(member.instance):
                raise
