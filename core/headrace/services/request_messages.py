"""Messages about requests to a rollout instance: from environment workers, and between two instances."""

from __future__ import annotations

from headrace.contract import Completion, GenerationRequest, Interruption, RequestState
from headrace.services.messages import Message


class GenerateCall(Message, frozen=True):
    """One request to an instance. In lockstep the instance begins a cohort only when all of it has arrived."""

    request: GenerationRequest
    trajectory: int = -1
    attempt: int = 0
    """The try of the trajectory that it belongs to."""
    cohort: str = ""
    cohort_size: int = 0
    movable: bool = False
    """Whether it may be sent on to another instance: the caller goes where :class:`Generated` says. And whether it goes
    on under a newer version when the instance is told to switch."""


class Generated(Message, frozen=True):
    """What became of a request: its completion, or the address where it goes on: the same call is made there, and
    finds the request under way if it was sent along."""

    completion: Completion | None = None
    moved: str = ""


class WithdrawCall(Message, frozen=True):
    """A trajectory of a cohort will not be sent."""

    cohort: str
    cohort_size: int
    trajectory: int


class SwitchCall(Message, frozen=True):
    """From now on all that may be interrupted is generated under ``version``, which has been loaded: what is in the
    middle of its answer, what waits, and what comes under an older one."""

    version: int
    interruption: Interruption


class Switched(Message, frozen=True):
    """``interrupted``: (trajectory, attempt, tokens of the answer so far) of those that had begun to be answered."""

    interrupted: list[tuple[int, int, int]]
    prefilled_tokens: int
    """Tokens whose keys and values are computed again."""
    pause_seconds: float
    """Until all were out of the engine."""
    resume_seconds: float
    """Until the engine had all back."""
    stopped_seconds: float
    """From the first one out to the last one back. In between the version is put in place, where the engine has room
    for one, and is verified."""


class MoveCall(Message, frozen=True):
    """Send a trajectory on to another instance, with the request that it is waiting for."""

    trajectory: int
    attempt: int
    """Its present try: what is known of this move is void for the next one."""
    version: int
    target: str
    """Address."""


class Moved(Message, frozen=True):
    """What it took. All 0 for a trajectory that was waiting for nothing: it comes with its next request."""

    tokens: int = 0
    """Of prompt and answer, so far."""
    nbytes: int = 0
    """Of keys and values."""
    prefilled_tokens: int = 0
    """Tokens whose keys and values are computed again."""


class OfferCall(Message, frozen=True):
    """Before a request is sent on: would it be taken?"""

    version: int
    trajectory: int
    fingerprint: str
    """Of its keys and values; empty without any."""


class Offered(Message, frozen=True):
    """Yes. ``with_kv``: its keys and values are of use."""

    with_kv: bool


class CarryCall(Message, frozen=True):
    """A request that was taken out of another instance."""

    state: RequestState
    trajectory: int
    attempt: int
