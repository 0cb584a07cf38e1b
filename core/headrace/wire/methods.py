"""Which methods of a service may be called from outside, and with what."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from headrace.wire.codec import TypedDecoder, decoder_for
from headrace.wire.latency import Latency

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__headrace_rpc__"


def rpc(method: F) -> F:
    """Mark ``async def method(self, request: T) -> R`` as callable by clients. A plain ``def`` is answered at once,
    without a task of its own; what cannot be answered yet it answers with an ``asyncio.Future``, of which a
    :class:`headrace.wire.Promise` is answered soonest.

    A service that also has ``take_back_method(self, request: T, answer: R)`` is told, in a turn of the loop of its own,
    of answers to callers that are known to be gone."""
    setattr(method, _MARK, True)
    return method


@dataclass(frozen=True, slots=True)
class Method:
    """One marked method, bound."""

    name: str
    call: Callable[[Any], Any]
    request: TypedDecoder
    plain: bool
    """Not ``async``."""
    take_back: Callable[[Any, Any], None] | None = None
    """Told of the request and the answer, when nobody is there to hear it."""
    latency: Latency = field(default_factory=Latency, compare=False)


def methods_of(service: object) -> dict[str, Method]:
    """Marked methods by name. ValueError for one whose signature says not exactly what it takes and gives."""
    found = {}
    for name, function in inspect.getmembers(type(service), inspect.isfunction):
        if getattr(function, _MARK, False):
            plain = not inspect.iscoroutinefunction(function)
            found[name] = Method(
                name,
                getattr(service, name),
                decoder_for(_request_type(function)),
                plain,
                getattr(service, f"take_back_{name}", None),
            )
    if not found:
        raise ValueError(f"{type(service).__qualname__} has no @rpc method")
    return found


def _request_type(function: Callable[..., Any]) -> Any:
    where = function.__qualname__
    parameters = list(inspect.signature(function).parameters)
    if len(parameters) != 2:
        raise ValueError(f"{where}: an rpc method is `async def method(self, request: T) -> R`, or without async")
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise ValueError(f"{where}: its annotations must be importable at run time: {error}") from error
    if parameters[1] not in hints or "return" not in hints:
        raise ValueError(f"{where}: an rpc method's request and reply are annotated")
    return hints[parameters[1]]
