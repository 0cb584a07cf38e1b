"""What a phase's algorithm declares, and the stages that follow from it."""

from __future__ import annotations

from headrace.config import Phase
from headrace.contract import Algorithm, AlgorithmNeeds
from headrace.flow.stages import Stage, stages_of
from headrace.registry import load, settings_of


def needs_of(phase: Phase) -> AlgorithmNeeds:
    """What the phase's algorithm needs with its settings."""
    spec = phase.algorithm
    cls = load(spec.role, spec.use, directory=spec.directory, origin=spec.origin)
    assert issubclass(cls, Algorithm), "load checks the class"
    return cls.needs(settings_of(cls, spec.settings, origin=spec.origin))


def phase_stages(phase: Phase) -> tuple[Stage, ...]:
    """What is done to the phase's rows."""
    return stages_of(needs_of(phase))
