"""A job as text: its processes, who talks to whom, and what each phase does to its rows."""

from __future__ import annotations

from headrace.config import Job, Phase, transport_of
from headrace.contract import AlgorithmNeeds
from headrace.flow.stages import Stage, flowing, separable, stored_first
from headrace.graph.declared import has_greedy_answers, interruption_of, needs_of, phase_stages, policy_of


def describe(job: Job) -> str:
    """Processes, edges, phases."""
    return "\n".join([*_processes(job), "", *_edges(job), "", *_phases(job)])


def _processes(job: Job) -> list[str]:
    trainer, rollout, environment = job.trainer, job.rollout, job.environment
    scoring = environment.workers * environment.scoring_workers
    rows = [
        ("controller", 1, "flow, ledger, supervisor, display", None),
        ("trainer", 1, f"{job.phases[0].trainer.use}, {_threads(trainer.threads)}, publishes weights", trainer.python),
        ("rollout", rollout.instances, f"{rollout.spec.use}, {_threads(rollout.threads)}", rollout.python),
        ("environment worker", environment.workers, f"{environment.spec.use}, plays episodes", environment.python),
        ("scoring worker", scoring, f"killed past {environment.scoring_deadline:g} s", environment.python),
        ("storage unit", job.storage.units, job.storage.spec.use, None),
        *((f"{stage.name} stage", 1, _stage(job, stage), trainer.python) for stage in _apart(job)),
    ]
    total = sum(count for _, count, _, _ in rows)
    lines = [f"{job.job.name}: {total} processes, started by {job.launcher.spec.use}"]
    for name, count, what, python in rows:
        lines.append(f"  {count:>3} x {name:<18}  {what}" + (f", in {python}" if python else ""))
    return lines


def _apart(job: Job) -> list[Stage]:
    """Stages that have a process of their own in any phase."""
    if not job.stages.processes:
        return []
    stages = [stage for phase in job.phases for stage in phase_stages(phase) if separable(stage)]
    return list({stage.name: stage for stage in stages}.values())


def _stage(job: Job, stage: Stage) -> str:
    plugin = job.phases[0].trainer.use if stage.by_row else "the phase's algorithm"
    return f"{plugin}, {_threads(job.trainer.threads)}, adds {', '.join(stage.writes)}"


def _edges(job: Job) -> list[str]:
    made = {column: None for phase in job.phases for column in stored_first(phase_stages(phase))}
    apart = _apart(job)
    stored = ", ".join(made)
    trained = ", ".join([*made, *(column for stage in apart for column in stage.writes)])
    weights = transport_of(job).use
    edges = [
        ("controller", "environment worker", "tickets: group, policy version, instance"),
        ("environment worker", "rollout", "prompt tokens, seed, policy version"),
        ("rollout", "environment worker", "sampled tokens, log-probs, version spans"),
        ("environment worker", "scoring worker", "task and episode; back: reward"),
        ("environment worker", "storage unit", stored),
        *(
            edge
            for stage in apart
            for edge in (
                ("storage unit", f"{stage.name} stage", ", ".join(stage.reads)),
                (f"{stage.name} stage", "storage unit", ", ".join(stage.writes)),
            )
        ),
        ("storage unit", "trainer", f"rows of the batch: {trained}"),
        ("controller", "trainer", "which rows to train, when to publish"),
        ("trainer", "rollout", f"weights of each policy version, over {weights}"),
        ("controller", "rollout", "which versions to load and retire"),
    ]
    return ["who sends what to whom", *(f"  {a:<18} -> {b:<18}  {what}" for a, b, what in edges)]


def _phases(job: Job) -> list[str]:
    lines = ["phases"]
    for phase in job.phases:
        needs, batch = needs_of(phase), phase.batch
        end = f", or until {phase.until.metric} >= {phase.until.at_least:g}" if phase.until else ""
        greedy = " and a greedy one" if has_greedy_answers(phase) else ""
        source = "rollouts" if needs.rollout else "the environment's demonstrations"
        lines += [
            f"  {phase.name}: {phase.steps} batches{end}",
            f"    algorithm  {phase.algorithm.use}, on {source}",
            f"    batch      {batch.groups} groups x {batch.group_size} trajectories{greedy}, {batch.mini_batches} "
            f"mini-batches, {batch.micro_batch_tokens} tokens per micro-batch",
        ]
        if needs.rollout:
            policy = policy_of(phase)
            lines.append(f"    staleness  {phase.staleness.use}, at most {policy.max_staleness} versions old")
            if interruption_of(phase) is not None:
                lines.append("    versions   a trajectory goes on under newer ones in the middle of its answer")
        computed = [name for name, wanted in _computed(needs, apart=job.stages.processes) if wanted]
        if computed:
            lines.append(f"    trainer    also computes {', '.join(computed)}")
        lines += ["    stages, and the columns that go from one to the next", *_stages(phase)]
    return lines


def _computed(needs: AlgorithmNeeds, *, apart: bool) -> list[tuple[str, bool]]:
    return [
        ("values of a critic at the start of each batch", needs.values),
        ("proximal log-probs at the start of each batch", needs.proximal_logprobs),
        ("reference log-probs from the weights at the start of the phase", needs.reference_logprobs and not apart),
        ("advantages and loss weights", not apart),
    ]


def _stages(phase: Phase) -> list[str]:
    edges = flowing(phase_stages(phase))
    return [f"      {edge.source:<11} -> {edge.target:<9}  {', '.join(edge.columns)}" for edge in edges]


def _threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"
