"""Whether a job can have as many instances of its inference engine as it asks for."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.schema import Job
from headrace.contract import InferenceCapabilities
from headrace.errors import WiringError


def check_instances(job: Job, engine: InferenceCapabilities | None) -> Iterator[WiringError]:
    """``engine``: None where unknown."""
    if engine is None or engine.instances is None:
        return
    table = job.rollout
    for path, asked in (
        (("rollout", "instances"), table.instances),
        (("rollout", "autoscale", "max"), table.autoscale.max if table.autoscale else 0),
    ):
        if asked > engine.instances:
            yield WiringError(
                f"{asked} instances are asked for; of inference engine {table.spec.use!r}, as it is set, there can be "
                f"{engine.instances}",
                origin=job.origin(path),
                fix=f"set {'.'.join(path)} to {engine.instances} at most, or give the engine what more of them need",
            )
