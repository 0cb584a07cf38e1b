"""What a job says about tasks, seeds and sampling, as the plans that the controller and the evaluator follow."""

from __future__ import annotations

from headrace.config import Job, Phase
from headrace.contract import (
    Algorithm,
    Environment,
    InferenceCapabilities,
    InferenceEngine,
    StalenessPolicy,
    TrainingCapabilities,
    TrainingEngine,
)
from headrace.registry import PluginSpec, build, load, settings_of
from headrace.run.evaluation import EvaluationPlan
from headrace.run.seeds import derive_seed
from headrace.run.stream import task_order
from headrace.services.groups import GroupPlan

FLOAT32_TOLERANCE = 1e-3
LOW_PRECISION_TOLERANCE = 0.25


def rolls_out(phase: Phase) -> bool:
    """Whether the phase's algorithm trains on generated rows, as opposed to demonstrations."""
    spec = phase.algorithm
    cls = load("algorithm", spec.use, directory=spec.directory)
    assert issubclass(cls, Algorithm)
    return cls.needs(settings_of(cls, spec.settings, origin=spec.origin)).rollout


def group_plan(job: Job, phase: Phase, environment: Environment) -> GroupPlan:
    """How the groups of a phase are filled."""
    seed, tasks = job.job.seed, environment.size("train")
    return GroupPlan(
        partition=phase.name,
        rollout=rolls_out(phase),
        max_new_tokens=job.rollout.max_new_tokens,
        temperature=job.rollout.temperature,
        task_index=task_order(tasks, seed=seed),
        next_task=lambda task: task + 1 if tasks is None else (task + 1) % tasks,
        seed=lambda trajectory: derive_seed(seed, "trajectory", trajectory),
        max_failed_share=job.environment.max_failed_share,
    )


def held_out_tasks(job: Job, environment: Environment) -> int:
    """Held-out tasks to ask per evaluation: all of them when there are fewer than the job asks for."""
    size = environment.size("evaluation")
    return job.evaluation.prompts if size is None else min(size, job.evaluation.prompts)


def evaluation_plan(job: Job, tasks: int) -> EvaluationPlan:
    """How held-out answers are drawn."""
    return EvaluationPlan(
        config=job.evaluation,
        tasks=tasks,
        seed=derive_seed(job.job.seed, "held-out"),
        max_new_tokens=job.rollout.max_new_tokens,
        temperature=job.rollout.temperature,
        lockstep=any(_lockstep(phase) for phase in job.phases),
    )


def self_check_tolerance(job: Job) -> float:
    """Nats per token by which trainer and engine may differ on the same tokens under the same weights."""
    dtypes = {
        _capabilities(job.rollout.spec).dtype,
        _capabilities(job.phases[0].trainer).dtype,
    }
    return FLOAT32_TOLERANCE if dtypes == {"float32"} else LOW_PRECISION_TOLERANCE


def _capabilities(spec: PluginSpec) -> InferenceCapabilities | TrainingCapabilities:
    cls = load(spec.role, spec.use, directory=spec.directory)
    assert issubclass(cls, (InferenceEngine, TrainingEngine))
    return cls.capabilities(settings_of(cls, spec.settings, origin=spec.origin))


def capacity(spec: PluginSpec) -> tuple[int, int]:
    """(requests, live versions) an instance of this engine takes at a time."""
    found = _capabilities(spec)
    assert isinstance(found, InferenceCapabilities)
    return found.slots, found.live_versions


def _lockstep(phase: Phase) -> bool:
    policy = build(phase.staleness)
    assert isinstance(policy, StalenessPolicy)
    return policy.lockstep
