"""A job as text: its processes, who talks to whom, and what each phase does to its rows."""

from __future__ import annotations

from headrace.config import Job
from headrace.contract import AlgorithmNeeds
from headrace.contract.columns import BEHAVIOUR_LOGPROBS, GROUP, LOSS_MASK, REWARD, TOKENS, TRUNCATED, VERSION
from headrace.flow.stages import flowing, stages_of
from headrace.graph.phases import needs_of

STORED = (TOKENS, LOSS_MASK, BEHAVIOUR_LOGPROBS, REWARD, GROUP, VERSION, TRUNCATED)


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
        ("storage unit", 1, job.storage.spec.use, None),
    ]
    total = sum(count for _, count, _, _ in rows)
    lines = [f"{job.job.name}: {total} processes, started by {job.launcher.spec.use}"]
    for name, count, what, python in rows:
        lines.append(f"  {count:>3} x {name:<18}  {what}" + (f", in {python}" if python else ""))
    return lines


def _edges(job: Job) -> list[str]:
    stored = ", ".join(STORED)
    weights = job.weights.spec.use
    edges = [
        ("controller", "environment worker", "tickets: group, policy version, instance"),
        ("environment worker", "rollout", "prompt tokens, seed, policy version"),
        ("rollout", "environment worker", "sampled tokens, log-probs, version spans"),
        ("environment worker", "scoring worker", "task and episode; back: reward"),
        ("environment worker", "storage unit", stored),
        ("storage unit", "trainer", f"rows of the batch: {stored}"),
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
        source = "rollouts" if needs.rollout else "the environment's demonstrations"
        lines += [
            f"  {phase.name}: {phase.steps} batches{end}",
            f"    algorithm  {phase.algorithm.use}, on {source}",
            f"    batch      {batch.groups} groups x {batch.group_size} trajectories, {batch.mini_batches} "
            f"mini-batches, {batch.micro_batch_tokens} tokens per micro-batch",
        ]
        if needs.rollout:
            bound = phase.staleness.settings["max_staleness"]
            lines.append(f"    staleness  {phase.staleness.use}, at most {bound} versions old")
        computed = [name for name, wanted in _computed(needs) if wanted]
        if computed:
            lines.append(f"    trainer    also computes {', '.join(computed)}")
        lines += ["    stages, and the columns that go from one to the next", *_stages(needs)]
    return lines


def _computed(needs: AlgorithmNeeds) -> list[tuple[str, bool]]:
    return [
        ("proximal log-probs at the start of each batch", needs.proximal_logprobs),
        ("reference log-probs from the weights at the start of the phase", needs.reference_logprobs),
    ]


def _stages(needs: AlgorithmNeeds) -> list[str]:
    edges = flowing(stages_of(needs))
    return [f"      {edge.source:<11} -> {edge.target:<9}  {', '.join(edge.columns)}" for edge in edges]


def _threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"
