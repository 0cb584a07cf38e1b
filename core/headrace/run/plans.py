"""What a job says about tasks, seeds and sampling, as the plans that the controller and the evaluator follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.config import Job, Phase
from headrace.contract import Environment
from headrace.flow import FlowColumns
from headrace.flow.stages import separable
from headrace.graph.declared import (
    engine_capabilities,
    has_greedy_answers,
    interruption_of,
    needs_of,
    phase_stages,
    policy_of,
)
from headrace.registry import PluginSpec
from headrace.run.columns import flow_columns
from headrace.run.evaluation import EvaluationPlan
from headrace.run.seeds import derive_seed
from headrace.run.stream import task_order
from headrace.services.groups import GroupPlan
from headrace.services.stage_messages import StagePhase

FLOAT32_TOLERANCE = 1e-3
LOW_PRECISION_TOLERANCE = 0.25
UNALIGNED_TOLERANCE = 5.0
"""Where a low-bit rollout differs from its trainer by design, only garbage is told from weights that belong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Who does what to the rows of a phase."""

    columns: FlowColumns
    """That are stored."""
    apart: Mapping[str, StagePhase]
    """Stage with a process of its own → what it does."""
    trainer: tuple[str, ...]
    """Those that could have one, and are the trainer's."""


def stage_plan(job: Job, phase: Phase, *, model_path: str) -> StagePlan:
    """``model_path``: what the phase starts from."""
    columns = _columns(job, phase)
    separate = tuple(stage.name for stage in phase_stages(phase) if separable(stage))
    apart = {
        name: StagePhase(
            partition=phase.name,
            reads=columns.consumers[name],
            writes=writes,
            engine=phase.trainer,
            algorithm=phase.algorithm,
            model_path=model_path,
            temperature=job.rollout.temperature,
            lockstep=is_lockstep(phase),
            tokens=phase.batch.micro_batch_tokens,
        )
        for name, writes in columns.writes.items()
    }
    return StagePlan(columns=columns, apart=apart, trainer=() if apart else separate)


def _columns(job: Job, phase: Phase) -> FlowColumns:
    return flow_columns(phase_stages(phase), apart=job.stages.processes, lockstep=is_lockstep(phase))


def stage_nodes(job: Job) -> tuple[str, ...]:
    """The stages that have a process of their own in any phase."""
    return tuple(dict.fromkeys(name for phase in job.phases for name in _columns(job, phase).writes))


def group_plan(job: Job, phase: Phase, environment: Environment) -> GroupPlan:
    """How the groups of a phase are filled."""
    seed, tasks, columns = job.job.seed, environment.size("train"), _columns(job, phase)
    batch, interruption, greedy = phase.batch, interruption_of(phase), has_greedy_answers(phase)
    rollout = needs_of(phase).rollout
    return GroupPlan(
        partition=phase.name,
        columns=columns.first,
        by_row=bool(columns.by_row),
        rollout=rollout,
        max_new_tokens=job.rollout.max_new_tokens,
        temperature=job.rollout.temperature,
        task_index=task_order(tasks, seed=seed),
        next_task=lambda task: task + 1 if tasks is None else (task + 1) % tasks,
        seed=lambda trajectory: derive_seed(seed, "trajectory", trajectory),
        greedy=greedy,
        mask_older=interruption is not None and interruption.mask_older,
        max_failed_share=job.environment.max_failed_share,
        max_generated=batch.max_generated_batches * batch.groups if rollout and batch.dynamic_sampling else None,
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
        lockstep=any(is_lockstep(phase) for phase in job.phases),
    )


def self_check_tolerance(job: Job) -> float:
    """Nats per token by which trainer and engine may differ on the same tokens under the same weights."""
    if job.quantization is not None:
        return LOW_PRECISION_TOLERANCE if job.quantization.align else UNALIGNED_TOLERANCE
    dtypes = {
        engine_capabilities(job.rollout.spec).dtype,
        engine_capabilities(job.phases[0].trainer).dtype,
    }
    return FLOAT32_TOLERANCE if dtypes == {"float32"} else LOW_PRECISION_TOLERANCE


def aligned_scheme(job: Job) -> PluginSpec | None:
    """The scheme that the trainer computes in; None: its weights are as they are."""
    return job.quantization.spec if job.quantization is not None and job.quantization.align else None


def is_lockstep(phase: Phase) -> bool:
    """Whether a phase's numbers are the same to the bit in every run."""
    return policy_of(phase).lockstep
