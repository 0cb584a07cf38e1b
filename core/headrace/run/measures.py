"""One record per training batch: what the trainer measured, and what only the controller can see."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.config import Phase
from headrace.flow import BatchLease, Flow
from headrace.services.messages import TrainReply
from headrace.services.tally import Tally


class Measures:
    """Counters with a fixed relation: a batch is ``groups * group_size`` trajectories, ``mini_batches`` optimiser
    steps and one policy version."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._phase: Phase | None = None
        self._flow: Flow | None = None
        self._last = time.monotonic()
        self.prompts = 0
        self.samples = 0
        self.optimizer_steps = 0

    def restore(self, *, prompts: int, samples: int, optimizer_steps: int) -> None:
        """Go on counting from where a resumed run was."""
        self.prompts, self.samples, self.optimizer_steps = prompts, samples, optimizer_steps

    def begin_phase(self, phase: Phase, flow: Flow) -> None:
        """Records belong to this phase from now on."""
        self._phase, self._flow = phase, flow
        self._last = time.monotonic()

    def batch(self, lease: BatchLease, reply: TrainReply, *, step: int, wait_seconds: float, tally: Tally) -> None:
        """Record a trained batch."""
        assert self._phase is not None
        assert self._flow is not None
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        busy = reply.finished - reply.started
        self.prompts += len(lease.groups)
        self.samples += len(lease.rows)
        self.optimizer_steps += reply.applied
        counts = self._flow.counts()
        self._write(
            {
                "prompts": self.prompts,
                "samples": self.samples,
                "optimizer_steps": self.optimizer_steps,
                **{name: metric.value for name, metric in sorted(reply.metrics.items())},
                "rollout/tokens_per_second": tally.response_tokens / elapsed,
                "rollout/failed": sum(tally.failed.values()),
                **{f"rollout/failed/{reason}": count for reason, count in sorted(tally.failed.items())},
                "rollout/uninformative_groups": tally.uninformative,
                "rollout/moves": tally.moves,
                "rollout/failed_moves": tally.failed_moves,
                "rollout/tokens_prefilled_again": tally.prefilled_again,
                "rollout/parked": tally.parked,
                "rollout/interrupted": tally.interrupted,
                "rollout/mixed": tally.mixed,
                "update/transfer_seconds": tally.transfer_seconds,
                "update/transfer_bytes": tally.transfer_bytes,
                "update/pause_seconds": tally.pause_seconds,
                "update/resume_seconds": tally.resume_seconds,
                "update/stopped_seconds": tally.stopped_seconds,
                "train/tokens_per_second": reply.tokens / busy if busy > 0 else 0.0,
                "train/seconds": busy,
                "trainer/wait_seconds": wait_seconds,
                "trainer/idle_share": wait_seconds / elapsed,
                "flow/in_flight": counts.in_flight,
                "flow/buffered": counts.buffered,
                "flow/buffered_bytes": self._flow.nbytes,
                "flow/dropped": sum(counts.dropped.values()),
                "flow/live_versions": len(self._flow.live_versions()),
                "nodes/max_loop_lag_seconds": tally.loop_lag,
            },
            phase=self._phase.name,
            version=lease.version,
            step=step,
        )
        tally.clear()
