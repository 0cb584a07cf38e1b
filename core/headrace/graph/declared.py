"""What a job's plugins declare of themselves, and the stages that follow from it."""

from __future__ import annotations

from headrace.config import Phase
from headrace.contract import (
    Algorithm,
    AlgorithmNeeds,
    InferenceCapabilities,
    InferenceEngine,
    TrainingCapabilities,
    TrainingEngine,
)
from headrace.flow.stages import Stage, stages_of
from headrace.registry import PluginSpec, load, settings_of


def needs_of(phase: Phase) -> AlgorithmNeeds:
    """What the phase's algorithm needs with its settings."""
    spec = phase.algorithm
    cls = load(spec.role, spec.use, directory=spec.directory, origin=spec.origin)
    assert issubclass(cls, Algorithm), "load checks the class"
    return cls.needs(settings_of(cls, spec.settings, origin=spec.origin))


def phase_stages(phase: Phase) -> tuple[Stage, ...]:
    """What is done to the phase's rows."""
    return stages_of(needs_of(phase))


def engine_capabilities(spec: PluginSpec) -> InferenceCapabilities | TrainingCapabilities:
    """What an engine can do with its settings."""
    cls = load(spec.role, spec.use, directory=spec.directory, origin=spec.origin)
    assert issubclass(cls, (InferenceEngine, TrainingEngine))
    return cls.capabilities(settings_of(cls, spec.settings, origin=spec.origin))


def rollout_capabilities(spec: PluginSpec) -> InferenceCapabilities:
    """What an inference engine can do with its settings."""
    found = engine_capabilities(spec)
    assert isinstance(found, InferenceCapabilities)
    return found
