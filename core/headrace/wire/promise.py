"""What a method answers with when it cannot answer yet, and somebody else's call will let it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Promise(asyncio.Future[T]):
    """A future of the running loop that also calls back at once when it ends, not in the loop's next turn: what was
    waited for leaves before the answer to the call that brought it."""

    def __init__(self) -> None:
        super().__init__(loop=asyncio.get_running_loop())
        self._told: Callable[[], None] | None = None

    def at_end(self, told: Callable[[], None]) -> None:
        """Call ``told`` as soon as there is a result or an exception, or it was cancelled; for one that has not ended.
        It must not raise, nor touch whoever ends the promise."""
        self._told = told

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
        if self._told is not None:
            self._told()
