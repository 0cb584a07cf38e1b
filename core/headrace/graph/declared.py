"""What a job's plugins declare of themselves, and the stages that follow from it."""

from __future__ import annotations

from headrace.config import Phase
from headrace.contract import (
    Algorithm,
    AlgorithmNeeds,
    InferenceCapabilities,
    InferenceEngine,
    Interruption,
    StalenessPolicy,
    TrainingCapabilities,
    TrainingEngine,
)
from headrace.flow.stages import Stage, stages_of
from headrace.registry import PluginSpec, build, load, settings_of


def needs_of(phase: Phase) -> AlgorithmNeeds:
    """What the phase's algorithm needs with its settings."""
    spec = phase.algorithm
    cls = load(spec.role, spec.use, directory=spec.directory, origin=spec.origin)
    assert issubclass(cls, Algorithm), "load checks the class"
    return cls.needs(settings_of(cls, spec.settings, origin=spec.origin))


def policy_of(phase: Phase) -> StalenessPolicy:
    """The phase's staleness policy."""
    policy = build(phase.staleness)
    assert isinstance(policy, StalenessPolicy), "the registry checks the role"
    return policy


def interruption_of(phase: Phase) -> Interruption | None:
    """What the phase makes of trajectories in the middle of their answers; None also where nothing is rolled out."""
    return policy_of(phase).interruption if needs_of(phase).rollout else None


def has_greedy_answers(phase: Phase) -> bool:
    """Whether one more answer to each prompt is decoded greedily."""
    needs = needs_of(phase)
    return needs.rollout and needs.greedy_reward


def group_rows(phase: Phase) -> int:
    """Trajectories of a group, a greedy answer included."""
    return phase.batch.group_size + has_greedy_answers(phase)


def phase_stages(phase: Phase) -> tuple[Stage, ...]:
    """What is done to the phase's rows."""
    return stages_of(needs_of(phase), interrupts=interruption_of(phase) is not None)


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
