from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.wire import Server, rpc


def two_arguments() -> type:
    class TwoArguments:
        @rpc
        async def method(self, one: int, two: int) -> int:
            return one + two

    return TwoArguments


def not_annotated() -> type:
    class NotAnnotated:
        @rpc
        async def method(self, request):  # type: ignore[no-untyped-def]  # the rule under test
            return request

    return NotAnnotated


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (two_arguments, "async def method"),
        (not_annotated, "annotated"),
        (lambda: int, "no @rpc method"),
    ],
)
def test_a_service_that_does_not_say_what_it_takes_is_refused_at_once(make: Callable[[], type], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Server(make()(), address="ipc:///nowhere")
