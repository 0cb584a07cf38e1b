"""What is simulated: a phase of a job, with what things cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from headrace.config import Job, Phase, SimulationConfig
from headrace.contract import StalenessPolicy
from headrace.errors import ConfigError
from headrace.graph.declared import group_rows, needs_of, rollout_capabilities
from headrace.registry import PluginSpec, build
from headrace.simulate.lengths import Lengths, Trajectories, parse_lengths

BATCHES = 40
"""Simulated unless the phase has fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything but the policy."""

    batches: int
    """Training batches; the first quarter is not measured."""
    batch_groups: int
    group_size: int
    streaming: bool
    order: Literal["stream", "longest_first"]
    """In which groups start."""
    instances: int
    slots: int
    """Of an instance."""
    live_versions: int
    """Of an instance."""
    migrates: bool
    """Whether instances hand over the keys and values of a request that moves."""
    max_attempts: int
    evaluation_every: int
    """Batches; 0: never."""
    evaluation_answers: int
    """To held-out prompts, of an evaluation."""
    costs: SimulationConfig
    trajectories: Trajectories
    seed: int

    def __post_init__(self) -> None:
        if self.costs.step_seconds is None:
            raise ConfigError(
                "what a decode step costs is not known: simulation.step_seconds is missing",
                origin="[simulation]",
                fix="measure it with --calibrate RUN, or --set simulation.step_seconds=0.03",
            )
        longest = self.costs.prompt_tokens + self.trajectories.longest + 1
        if self.costs.kv_tokens is not None and self.costs.kv_tokens < longest:
            raise ConfigError(
                f"simulation.kv_tokens = {self.costs.kv_tokens} < {longest}: the longest trajectory alone does not "
                "fit into an instance's KV cache, and would be put back for ever",
                origin="[simulation]",
                fix=f"set simulation.kv_tokens to at least {longest}, or lower rollout.max_new_tokens",
            )

    @property
    def warm_up(self) -> int:
        """Batches that are not measured."""
        return self.batches // 4

    @property
    def full_rate(self) -> float:
        """Tokens per second of all instances with every slot taken."""
        assert self.costs.step_seconds is not None, "checked above"
        step = self.costs.step_seconds + self.costs.step_seconds_per_request * (self.slots - 1)
        return self.instances * self.slots / step


def scenario(
    job: Job,
    *,
    phase: Phase,
    lengths: Lengths | None,
    costs: SimulationConfig,
    instances: int | None = None,
    batches: int | None = None,
) -> Scenario:
    """A phase of a job. ConfigError when nothing says how long responses are, or what a decode step costs."""
    if lengths is None and costs.lengths is not None:
        lengths = parse_lengths(costs.lengths, directory=Path(job.directory), origin="simulation.lengths")
    if lengths is None:
        raise ConfigError(
            "how long responses are is not known",
            origin="[simulation]",
            fix="write --lengths lognormal:median=1300,sigma=1,cap=30000, or give a recorded run with --calibrate RUN",
        )
    able = rollout_capabilities(job.rollout.spec)
    return Scenario(
        batches=min(phase.steps, BATCHES) if batches is None else batches,
        batch_groups=phase.batch.groups,
        group_size=group_rows(phase),
        streaming=phase.batch.streaming,
        instances=job.rollout.instances if instances is None else instances,
        slots=able.slots,
        live_versions=able.live_versions,
        migrates=able.kv_migration,
        max_attempts=job.environment.max_attempts,
        evaluation_every=job.evaluation.every,
        evaluation_answers=job.evaluation.prompts * (job.evaluation.greedy + job.evaluation.sampled),
        costs=costs,
        order=job.rollout.order,
        trajectories=Trajectories(
            lengths,
            seed=job.job.seed,
            most=job.rollout.max_new_tokens,
            group_size=group_rows(phase),
            prompts=costs.prompts,
            alike=costs.alike,
        ),
        seed=job.job.seed,
    )


def rollout_phase(job: Job, name: str | None) -> Phase:
    """The phase of this name, or the last one that rolls out. ConfigError when there is none, or it does not."""
    phases = {phase.name: phase for phase in job.phases if needs_of(phase).rollout}
    if not phases:
        raise ConfigError(
            "no phase of this job rolls out: there is nothing to simulate",
            origin=job.origin(("phase",), ("algorithm",)),
            fix="give a phase an algorithm that learns from rollouts, such as grpo",
        )
    if name is not None and name not in phases:
        raise ConfigError(
            f"the job has no phase {name!r} that rolls out; those are: {', '.join(phases)}",
            origin="--phase",
            fix=f"--phase {next(reversed(phases))}",
        )
    return phases[name] if name is not None else next(reversed(phases.values()))


# ---------------------------------------------------------------- policies


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A policy that is tried, by the name it is shown under."""

    name: str
    policy: StalenessPolicy


def candidates(phase: Phase, names: Sequence[str]) -> list[Candidate]:
    """The policies ``names`` (``NAME`` or ``NAME:K``), or the phase's own when there are none. The phase's own settings
    are those of its own policy's name; K replaces its ``max_staleness``. What the registry raises, and StalenessError
    for a policy that would not run this phase."""
    specs = [_spec(phase.staleness, name) for name in names] or [phase.staleness]
    found: list[Candidate] = []
    for spec in specs:
        policy = build(spec)
        assert isinstance(policy, StalenessPolicy), "the registry checks the role"
        policy.check(batch_groups=phase.batch.groups)
        found.append(Candidate(name=f"{spec.use} K={policy.max_staleness}", policy=policy))
    return found


def _spec(own: PluginSpec, name: str) -> PluginSpec:
    use, colon, bound = name.rpartition(":") if name.rpartition(":")[2].isdigit() else (name, "", "")
    if use == own.use and not colon:
        return own
    settings = {"max_staleness": int(bound)} if colon else {}
    return replace(own, use=use, settings=settings, origin=f"--policies {name}")
