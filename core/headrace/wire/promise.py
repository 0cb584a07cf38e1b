"""What a method answers with when it cannot answer yet, and somebody else's call will let it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Promise(asyncio.Future[T]):
    """A future of the running loop that also calls back at once when it ends, not in the loop's next turn: what was
    waited for leaves before the answer to the call that brought it. And it knows whether its caller is still there."""

    def __init__(self) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._told: Callable[[], None] | None = None
        self._has_caller: Callable[[], bool] | None = None

    def at_end(self, told: Callable[[], None], *, has_caller: Callable[[], bool]) -> None:
        """Call ``told`` as soon as there is a result or an exception, or it was cancelled; for one that has not ended.
        It must not raise, nor touch whoever ends the promise. ``has_caller``: whether anybody would hear the answer."""
        self._told, self._has_caller = told, has_caller

    def is_awaited(self) -> bool:
        """Whether it has not ended, and whoever asked is not known to be gone: one that was killed neither cancels nor
        says good-bye. Costs a message."""
        return not self.done() and (self._has_caller is None or self._has_caller())

    def set_result(self, result: T) -> None:
        super().set_result(result)
        self._tell()

    def set_exception(self, exception: type | BaseException) -> None:
        super().set_exception(exception)
        self._tell()

    def cancel(self, msg: Any | None = None) -> bool:
        ended = super().cancel(msg)
        if ended:
            self._tell()
        return ended

    def _tell(self) -> None:
        told, self._told, self._has_caller = self._told, None, None  # what they hold goes now, without a collection
        if told is not None:
            told()
