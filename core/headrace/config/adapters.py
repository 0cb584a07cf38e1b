"""Whether what a trainer publishes of an adapter can be served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.config.schema import Job
from headrace.contract import InferenceCapabilities, TrainingCapabilities
from headrace.errors import WiringError


def check_adapters(
    job: Job, engine: InferenceCapabilities | None, trainers: Sequence[TrainingCapabilities | None]
) -> Iterator[WiringError]:
    """``trainers``: of each phase; None where unknown. One that leaves the weights it began with as they are publishes
    what not every engine can serve."""
    for index, (phase, trainer) in enumerate(zip(job.phases, trainers, strict=True)):
        if trainer is None or not trainer.adapter:
            continue
        what, place = f"training engine {phase.trainer.use!r} is set to train an adapter", ("phase", index, "trainer")
        if engine and not engine.adapters:
            yield WiringError(
                f"{what}, and inference engine {job.rollout.spec.use!r} serves none",
                origin=job.origin(place, ("trainer",)),
                fix="choose an inference engine with adapters, or have the trainer train all weights",
            )
        if job.quantization is not None:
            yield WiringError(
                f"{what}, and [quantization] has weights made low-bit anew for each version: those of an adapter's "
                "base never change",
                origin=job.origin(("quantization",), place, ("trainer",)),
                fix="remove [quantization], or have the trainer train all weights",
            )
