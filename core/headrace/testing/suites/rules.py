"""How a suite states a rule: a sentence on the test that proves it, and what was seen in place of it.

Invariant: whatever goes wrong inside a rule, the author reads the rule first.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Never


class RuleBrokenError(AssertionError):
    """A plugin does not keep a rule of its contract."""

    def __init__(self, rule: str, seen: str) -> None:
        super().__init__(f"\n  rule: {rule}\n  seen: {seen}")


class _SeenError(Exception):
    """What a check saw; the rule around it adds its sentence."""


def rule(sentence: str) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A test method that proves ``sentence``. A coroutine is run in an event loop of its own, so that a suite needs no
    plugin of pytest. Any exception but a skip becomes :class:`RuleBrokenError`."""

    def state(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def proved(*args: Any, **kwargs: Any) -> None:
            try:
                outcome = test(*args, **kwargs)
                if inspect.iscoroutine(outcome):
                    asyncio.run(outcome)
            except _SeenError as seen:
                raise RuleBrokenError(sentence, str(seen)) from None
            except Exception as error:  # a plugin may raise anything: the rule that it interrupted is broken
                raise RuleBrokenError(sentence, f"{type(error).__name__}: {error}") from error

        return proved

    return state


def check(holds: object, seen: str) -> None:
    """``seen``: what there was, in words; read only when the rule does not hold."""
    if not holds:
        raise _SeenError(seen)


def raises(expected: type[Exception], call: Callable[[], object], *, naming: tuple[str, ...] = ()) -> None:
    """``call`` raises ``expected``, with every word of ``naming`` in its message."""
    try:
        answer = call()
    except expected as error:
        _check_names(error, naming)
    else:
        _nothing_raised(expected, answer)


async def raises_async(
    expected: type[Exception], call: Coroutine[Any, Any, object], *, naming: tuple[str, ...] = ()
) -> None:
    """As :func:`raises`, for a coroutine."""
    try:
        answer = await call
    except expected as error:
        _check_names(error, naming)
    else:
        _nothing_raised(expected, answer)


def override(fixture: str, gives: str) -> Never:
    """For the fixtures that an author must write."""
    raise NotImplementedError(f"override the fixture `{fixture}` in your subclass: {gives}")


def _check_names(error: Exception, naming: tuple[str, ...]) -> None:
    absent = [word for word in naming if word not in str(error)]
    check(not absent, f"a {type(error).__name__} that does not name {', '.join(absent)}: {error}")


def _nothing_raised(expected: type[Exception], answer: object) -> Never:
    raise _SeenError(f"no {expected.__name__}, but the answer {answer!r}")
