"""What the controller counts between two training batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from headrace.services.messages import VersionLoaded
from headrace.services.request_messages import Switched


@dataclass(slots=True)
class Tally:
    """Counted since the last reading."""

    response_tokens: int = 0
    loop_lag: float = 0.0
    """Seconds by which the event loop of any node was late, at most."""
    failed: Counter[str] = field(default_factory=Counter)
    """Trajectories that failed or could not be scored, by reason."""
    uninformative: int = 0
    """Groups that dynamic sampling dropped."""
    moves: int = 0
    """Trajectories that went on on another instance."""
    failed_moves: int = 0
    """Moves that an instance refused, or did not get through with; whoever was to move went on where it was."""
    prefilled_again: int = 0
    """Tokens whose keys and values were computed again after a move or an interruption."""
    parked: int = 0
    """Requests set aside in host memory, with their keys and values, for want of room at their instance."""
    interrupted: int = 0
    """Answers that went on under a newer version in the middle."""
    mixed: int = 0
    """Trajectories that ended with tokens of several versions."""
    transfer_seconds: float = 0.0
    """Of a version, until an instance had fetched and staged it; this and the following: at most of any instance."""
    transfer_bytes: int = 0
    """That it fetched of it."""
    pause_seconds: float = 0.0
    """Until all answers that went on under a newer version were out of the engine."""
    resume_seconds: float = 0.0
    """Until it had all of them back."""
    stopped_seconds: float = 0.0
    """From the first one out to the last one back."""

    def loaded(self, loaded: VersionLoaded) -> None:
        """An instance has a version."""
        self.transfer_seconds = max(self.transfer_seconds, loaded.transfer_seconds)
        self.transfer_bytes = max(self.transfer_bytes, loaded.nbytes)

    def switched(self, switched: Switched) -> None:
        """An instance has answers go on under another version."""
        self.interrupted += len(switched.interrupted)
        self.prefilled_again += switched.prefilled_tokens
        self.pause_seconds = max(self.pause_seconds, switched.pause_seconds)
        self.resume_seconds = max(self.resume_seconds, switched.resume_seconds)
        self.stopped_seconds = max(self.stopped_seconds, switched.stopped_seconds)

    def clear(self) -> None:
        """It has been read."""
        self.response_tokens = self.uninformative = self.moves = self.failed_moves = self.prefilled_again = 0
        self.interrupted = self.mixed = self.parked = self.transfer_bytes = 0
        self.loop_lag = self.transfer_seconds = self.pause_seconds = self.resume_seconds = self.stopped_seconds = 0.0
        self.failed.clear()
