"""Scenarios of the simulator, without a job file: everything is free until a test gives it a cost."""

from __future__ import annotations

from typing import Any

from headrace.config import SimulationConfig
from headrace.contract import StalenessPolicy
from headrace.simulate.lengths import Constant, Lengths, Trajectories
from headrace.simulate.measures import Outcome
from headrace.simulate.scenario import Candidate, Scenario
from headrace.simulate.simulation import Simulation
from headrace_staleness.delayed_update import DelayedUpdate
from headrace_staleness.multi_version import MultiVersion
from headrace_staleness.partial_rollout import PartialRollout
from headrace_staleness.synchronous import Synchronous
from headrace_staleness.windowed import Windowed

TEN_TOKENS = Constant(tokens=10)


def scenario(
    *,
    lengths: Lengths = TEN_TOKENS,
    seed: int = 0,
    most: int = 10**6,
    costs: dict[str, Any] | None = None,
    **changes: Any,
) -> Scenario:
    """Steps of a second, 8 groups of 2 on 2 instances of 8 slots, unless a test says otherwise."""
    settings: dict[str, Any] = {
        "batches": 12,
        "batch_groups": 8,
        "group_size": 2,
        "streaming": False,
        "order": "stream",
        "instances": 2,
        "slots": 8,
        "live_versions": 4,
        "migrates": True,
        "max_attempts": 3,
        "evaluation_every": 0,
        "evaluation_answers": 0,
        "costs": SimulationConfig(**{"step_seconds": 1.0, **(costs or {})}),
        "trajectories": Trajectories(lengths, seed=seed, most=most),
        "seed": seed,
    }
    return Scenario(**{**settings, **changes})


def candidate(policy: StalenessPolicy) -> Candidate:
    return Candidate(name=type(policy).__name__, policy=policy)


def synchronous() -> Candidate:
    return candidate(Synchronous(Synchronous.Settings()))


def delayed_update() -> Candidate:
    return candidate(DelayedUpdate(DelayedUpdate.Settings()))


def windowed(bound: int) -> Candidate:
    return candidate(Windowed(Windowed.Settings(max_staleness=bound)))


def multi_version(bound: int) -> Candidate:
    return candidate(MultiVersion(MultiVersion.Settings(max_staleness=bound)))


def partial_rollout(bound: int, *, keep_kv: bool = False) -> Candidate:
    return candidate(PartialRollout(PartialRollout.Settings(max_staleness=bound, keep_kv=keep_kv)))


def run(at: Scenario, policy: Candidate) -> Outcome:
    return Simulation(at, policy).run()
