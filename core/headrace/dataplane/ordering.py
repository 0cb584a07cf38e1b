"""A consumer's own order, which only its process knows: it looks at all that is ready, chooses, and leases what it
chose.

    partition.take("train", 32, order=lambda ready: np.argsort(-ready.tokens))  # the longest first

Each lease costs as much as is ready. Nothing is held between look and lease: what others took meanwhile is looked for
again. Invariant: what was chosen is leased as if it had been next, complete and to nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from headrace.contract import Array
from headrace.dataplane.messages import LeaseCall, LookCall, Ready
from headrace.errors import ContractError, DeadlineError

T = TypeVar("T")


class Candidates(NamedTuple):
    """What a consumer could lease: ids of groups, or of rows where it works by row, the policy versions that they are
    ordered by, and their tokens; int64 [n] each, in the order in which they would be given."""

    ids: Array
    versions: Array
    tokens: Array


Order = Callable[[Candidates], Array]
"""Places of candidates, int [m], in the order in which a consumer wants them; what is left out it does not want."""


def lease_in_order(
    call: LeaseCall, order: Order, *, look: Callable[[LookCall], Ready], lease: Callable[[LeaseCall], T]
) -> T:
    """What ``lease`` answers, as soon as there is enough that ``order`` wants. ContractError when it gives what are no
    places, or ranks share batches; DeadlineError after ``call.wait`` seconds."""
    if call.share is not None:
        raise ContractError(
            f"consumer {call.consumer!r} of partition {call.partition!r} shares batches, and has an order of its own",
            fix="leave the order of what ranks share to the ledger",
        )
    if not callable(order):
        raise ContractError(
            f"order={order!r} cannot be called", fix="give a function of candidates: lambda ready: np.argsort(...)"
        )
    end, after = monotonic() + call.wait, 0
    while True:
        ready = look(LookCall(call, call.at_least, max(0.0, end - monotonic()), after))
        chosen = _chosen(ready, order)
        after = ready.became
        if len(chosen) < call.at_least:
            continue
        try:
            return lease(msgspec.structs.replace(call, chosen=chosen, wait=0.0))
        except DeadlineError as error:
            if monotonic() >= end:
                raise DeadlineError(f"others were faster for {call.wait:g} s: {error.message}") from error
            after = 0  # what is left may be enough


def _chosen(ready: Ready, order: Order) -> Array:
    assert ready.each is not None
    candidates = Candidates(*ready.each)
    places = np.asarray(order(candidates))
    if not places.size:
        return candidates.ids[:0]
    count = len(candidates.ids)
    if (
        places.ndim != 1
        or places.dtype.kind not in "iu"
        or not (0 <= places.min() <= places.max() < count)
        or len(np.unique(places)) < len(places)
    ):
        raise ContractError(
            f"an order of {count} candidates gave {places.dtype} {np.array2string(places, threshold=10)}",
            fix="give different places among them, from 0 on: np.argsort(-candidates.tokens)",
        )
    chosen: Array = candidates.ids[places]
    return chosen
