"""The thread that owns torch. The event loop talks to it through a queue of calls; outputs go back in batches.

Invariant: calls run in the order they were posted, each before the next decode step; the thread never
blocks on the event loop, and its last word is always the ``closed`` callback.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from headrace.contract.generation import GenerationOutput
from headrace_torch.decode.scheduler import Scheduler

Call = Callable[[Scheduler], list[GenerationOutput] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStatus:
    """The worker's state after its latest step."""

    running: int = 0
    kv_used: float = 0.0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    parked: int = 0


class DecodeWorker:
    """Runs a :class:`Scheduler` on a thread of its own.

    ``deliver`` gets the outputs of a step; ``closed`` gets None, or what broke the thread. Both are called
    on the thread and must return at once.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        name: str,
        threads: int,
        deliver: Callable[[list[GenerationOutput]], None],
        closed: Callable[[Exception | None], None],
    ) -> None:
        self._scheduler = scheduler
        self._threads = threads
        self._deliver = deliver
        self._closed = closed
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"decode-{name}", daemon=True)
        self.status = DecodeStatus()
        """Replaced as a whole, so that any thread may read it."""

    def start(self) -> None:
        """Begin to serve calls."""
        self._thread.start()

    def post(self, call: Call) -> None:
        """Have ``call`` run on the thread; what it returns is delivered."""
        self._calls.put(call)

    def stop(self) -> None:
        """End the thread after the step it is in, and wait for that."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            torch.set_num_threads(self._threads)
            while self._serve_calls():
                self._advance(self._scheduler.step())
        except Exception as error:  # the thread's supervisor: whatever broke it is handed on
            failure = error
        self._closed(failure)

    def _serve_calls(self) -> bool:
        """Run what was posted; waits while there is nothing to decode. False: stop."""
        while self._scheduler.idle or not self._calls.empty():
            call = self._calls.get()
            if call is None:
                return False
            self._advance(call(self._scheduler) or [])
        return True

    def _advance(self, outputs: list[GenerationOutput]) -> None:
        scheduler = self._scheduler
        self.status = DecodeStatus(
            running=scheduler.running,
            kv_used=scheduler.kv_used,
            generated_tokens=scheduler.generated_tokens,
            prefilled_tokens=scheduler.prefilled_tokens,
            parked=scheduler.parked,
        )
        if outputs:
            self._deliver(outputs)
