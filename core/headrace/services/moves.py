"""Requests that move from one rollout instance to another, straight between the two.

A move has two phases: the source asks the target whether it would take a request, by version and fingerprint alone;
then the request travels with its keys and values (DORA, arXiv 2604.26256, two-phase transfer). Invariant: the source
keeps a request until the target has confirmed it, and goes on with it when that does not come; of a request that went
on in both places one is asked for, and the other ends after :data:`UNASKED_SECONDS`. Who waits for a request makes its
call again where it went; it begins anew there when it was given up meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from headrace.contract import RequestState
from headrace.errors import HeadraceError
from headrace.services.messages import PeerCall
from headrace.services.request_messages import (
    CarryCall,
    MoveCall,
    Moved,
    OfferCall,
    Offered,
)
from headrace.services.requests import Pending, Requests
from headrace.wire import Client, rpc

OFFER_DEADLINE = 10.0
CARRY_DEADLINE = 60.0
REMEMBERED = 100_000
"""Trajectories that were sent on, of which their episodes may not have heard."""
UNASKED_SECONDS = 30.0
"""A request that came is given up when nobody has asked for it for so long."""


class Moves:
    """Both ends of every move of one instance. ``connect`` makes the client of an address."""

    def __init__(
        self,
        requests: Requests,
        *,
        name: str,
        connect: Callable[[str], Client],
        supervise: Callable[[Coroutine[Any, Any, None], str], Any],
    ) -> None:
        self._requests = requests
        self._name = name
        self._connect = connect
        self._supervise = supervise
        self._clients: dict[str, Client] = {}
        self._sent_on: dict[int, tuple[int, str]] = {}
        """Trajectory → the try that was sent on, and where to; the newest :data:`REMEMBERED`."""
        self._unasked: dict[str, asyncio.TimerHandle] = {}

    async def close(self) -> None:
        for timer in self._unasked.values():
            timer.cancel()
        for client in self._clients.values():
            await client.close()

    def sent_on(self, trajectory: int, attempt: int) -> str:
        """Where a try of a trajectory goes on that was here; "" when it goes on here."""
        found, address = self._sent_on.get(trajectory, (attempt, ""))
        return address if found == attempt else ""

    def _remember(self, call: MoveCall) -> None:
        """Also when its version is retired here: its episode may be busy elsewhere, and comes later."""
        self._sent_on.pop(call.trajectory, None)
        self._sent_on[call.trajectory] = call.attempt, call.target
        if len(self._sent_on) > REMEMBERED:
            del self._sent_on[next(iter(self._sent_on))]

    @rpc
    async def instance_lost(self, peer: PeerCall) -> None:
        """Nobody will answer there any more: what is being sent there goes on here."""
        if (client := self._clients.pop(peer.address, None)) is not None:
            await client.close()

    # ------------------------------------------------------------ the source

    @rpc
    async def move(self, call: MoveCall) -> Moved:
        """Send a trajectory on. Whatever goes wrong, its request goes on here, and the error is told."""
        moving = asyncio.ensure_future(self._move(call))
        moving.add_done_callback(_heard)
        return await asyncio.shield(moving)  # a caller that goes away does not leave a request between two places

    async def _move(self, call: MoveCall) -> Moved:
        offered = await self._offer(call)
        pending = self._requests.movable(call.trajectory, call.version)
        state = await self._requests.take(pending) if pending is not None else None
        if pending is None or state is None:  # it waits for nothing, or for what has just ended
            self._remember(call)
            return Moved()
        if not offered.with_kv:
            state = replace(state, kv=(), fingerprint="")
        try:
            again = await self._carry(state, call)
        except HeadraceError:
            await self._requests.go_on(pending, state)
            raise
        self._remember(call)
        self._requests.gone(pending, call.target)
        known = len(state.request.prompt) + len(state.token_ids)
        return Moved(tokens=known, nbytes=state.nbytes, prefilled_tokens=again)

    async def _offer(self, call: MoveCall) -> Offered:
        migration = self._requests.migration
        fingerprint = migration.fingerprint(call.version) if migration is not None else ""
        return await self._client(call.target).call(
            "offer",
            OfferCall(trajectory=call.trajectory, version=call.version, fingerprint=fingerprint),
            reply=Offered,
            deadline=OFFER_DEADLINE,
            awaiting=f"whether {call.target} takes trajectory {call.trajectory}",
        )

    async def _carry(self, state: RequestState, call: MoveCall) -> int:
        return await self._client(call.target).call(
            "carry",
            CarryCall(state=state, trajectory=call.trajectory, attempt=call.attempt),
            reply=int,
            deadline=CARRY_DEADLINE,
            awaiting=f"{call.target} to go on with trajectory {call.trajectory}",
        )

    def _client(self, address: str) -> Client:
        if address not in self._clients:
            self._clients[address] = self._connect(address)
        return self._clients[address]

    # ------------------------------------------------------------ the target

    @rpc
    async def offer(self, call: OfferCall) -> Offered:
        """Whether a request would be taken. EngineError when its version is not served."""
        await self._requests.require_version(call.version)
        self._sent_on.pop(call.trajectory, None)
        migration = self._requests.migration
        with_kv = migration is not None and call.fingerprint == migration.fingerprint(call.version)
        return Offered(with_kv=with_kv)

    @rpc
    async def carry(self, call: CarryCall) -> int:
        """Go on with a request that was taken out of another instance. Returns the tokens to prefill again."""
        request = call.state.request
        pending = self._requests.open(request, trajectory=call.trajectory, attempt=call.attempt, movable=True)
        try:
            again = await self._requests.go_on(pending, call.state)
        except BaseException:  # cancelled too: nobody will ask for it here; raised again
            await self._requests.close(pending)
            raise
        self._unasked[request.request_id] = asyncio.get_running_loop().call_later(
            UNASKED_SECONDS, self._give_up, pending
        )
        return again

    def _give_up(self, pending: Pending) -> None:
        self._unasked.pop(pending.request.request_id, None)
        self._supervise(self._requests.close(pending), f"give request {pending.request.request_id} up")

    def arrived(self, request_id: str) -> Pending | None:
        """A request that came from another instance, for who waits for it; once."""
        timer = self._unasked.pop(request_id, None)
        if timer is None:
            return None
        timer.cancel()
        return self._requests.get(request_id)


def _heard(moving: asyncio.Future[Moved]) -> None:
    """Its caller has gone, or hears of it too."""
    if not moving.cancelled():
        moving.exception()
