"""Rank 0 and the others as one: what all do, and how that ends.

Invariant: an order that may fail is refused by all ranks, and the crew goes on; or it has put them out of step, and the
crew has ended: every later order says why.
"""

from __future__ import annotations

from headrace.errors import EngineError
from headrace.wire import Failure, encode, from_failure
from headrace_torch.ranks.group import RefusedOrderError
from headrace_torch.ranks.orders import Done, Order, Setup, Shard, shard_class
from headrace_torch.ranks.others import START_SECONDS, LostRankError, Others

_FIX = "the node's log has what the ranks said; continue the run with: headrace run --resume RUN"


class Crew:
    """``shard``: rank 0's own; ``shares``: which share of a batch's rows each rank gets."""

    def __init__(self, others: Others) -> None:
        """Loads the model on all ranks. EngineError when that fails anywhere."""
        self._others, self._ended = others, ""
        self._joined = False
        self._name = others.setup.name
        self.shares: tuple[int, ...] = others.setup.settings.shares
        self._start(others.setup)
        others.have_met()

    def _start(self, setup: Setup) -> None:
        """Make rank 0's shard, and wait until all have theirs."""
        try:
            self._require(self._others.replies(seconds=START_SECONDS))
            try:
                self.shard: Shard = shard_class(setup.shard)(setup)
            except RefusedOrderError as refused:
                self._require(self._others.replies(), own=refused.__cause__)
                raise
            self._joined = True
            self._require(self._others.replies())
        except LostRankError as error:
            self._end(str(error))
            raise self._over() from error
        except BaseException as error:  # whatever it was, nobody may be left; raised again
            self._end(f"rank 0: {error}")
            raise

    @staticmethod
    def _require(replies: list[Done | Failure], *, own: BaseException | None = None) -> None:
        """Raise rank 0's ``own`` failure, or the first of the others'."""
        failures = [reply for reply in replies if isinstance(reply, Failure)]
        if own is not None or failures:
            raise own or from_failure(failures[0])

    def do(self, *orders: Order) -> list[Done]:
        """Rank by rank, what comes of each one's order: one order is all ranks'. Raises what a rank refused it with.
        EngineError when the crew has ended; TypeError for an order that cannot travel."""
        if self._ended:
            raise self._over()
        each = orders if len(orders) > 1 else orders * len(self.shares)
        messages = [encode(order) for order in each[1:]]
        refused: RefusedOrderError | None = None
        own = Done()
        try:
            self._others.send(messages)
            try:
                own = self.shard.do(each[0])
            except RefusedOrderError as error:
                refused = error
            replies = self._others.replies()
        except LostRankError as error:
            self._end(str(error))
            raise self._over() from error
        except Exception as error:  # of torch, in the middle of what all ranks do
            self._end(self._others.why(f"rank 0: {type(error).__name__}: {error}"))
            raise self._over() from error
        except BaseException:  # an interrupt; raised again
            self._end("rank 0 was interrupted")
            raise
        return self._judged(own, replies, refused)

    def _judged(self, own: Done, replies: list[Done | Failure], refused: RefusedOrderError | None) -> list[Done]:
        failures = [reply for reply in replies if isinstance(reply, Failure)]
        if refused is not None:
            raise refused.__cause__ or from_failure(failures[0])
        if failures:
            self._end("; ".join(failure.message for failure in failures))
            raise self._over()
        return [own, *(reply for reply in replies if isinstance(reply, Done))]

    def _end(self, why: str) -> None:
        self._ended = why
        self._others.close(kill=True)
        if self._joined:
            self.shard.close()

    def _over(self) -> EngineError:
        return EngineError(f"the ranks cannot go on: {self._ended}", origin=self._name, fix=_FIX)

    @property
    def pids(self) -> list[int]:
        """Of the other ranks' processes."""
        return self._others.pids

    def close(self) -> None:
        """End them; twice is fine."""
        self._others.close()
        if not self._ended:
            self._ended = "the engine is closed"
            self.shard.close()
