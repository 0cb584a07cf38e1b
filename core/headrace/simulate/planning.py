"""How many devices should roll out, how many train, and how stale rows need to be: a search over the simulator.

A device is what one rollout instance takes. Training is taken to speed up in proportion to its devices, which flatters
large trainers. For each K the search starts where the parts of a step balance (:func:`bound`) and climbs from there,
one device at a time, while the simulated throughput rises. Invariant: what is proposed was simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from headrace.config import Job
from headrace.errors import ConfigError, StalenessError
from headrace.simulate.comparing import Prepared, Wishes, prepare
from headrace.simulate.measures import Outcome, bound
from headrace.simulate.scenario import Candidate, Scenario, candidates, rollout_phase
from headrace.simulate.simulation import Simulation

WORTH = 0.99
"""Of the best throughput: a smaller K that reaches it is preferred."""
_SAMPLED = 4096
"""Trajectories whose mean length stands for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Devices, and what was simulated with them."""

    rollout: int
    trainer: int
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The best split for every K, ascending, and the one that is proposed."""

    splits: Sequence[Split]
    proposed: Split


def plan(job: Job, wishes: Wishes, *, devices: int, trainer_devices: int) -> Plan:
    """``devices``: to be divided. ``trainer_devices``: those on which training costs what the scenario says. K goes up
    to the phase's own ``max_staleness``. ConfigError for too few devices, and what :func:`prepare` raises."""
    if devices < 2:
        raise ConfigError(
            f"{devices} device cannot be divided: rollout and trainer need at least one each",
            origin="--devices",
            fix="--devices 2, or more",
        )
    prepared = prepare(job, wishes)
    splits = [
        _best(prepared.scenario, candidate, devices, trainer_devices)
        for candidate in _within_the_bound(job, wishes, prepared)
    ]
    best = max(split.outcome.tokens_per_second for split in splits)
    proposed = next(split for split in splits if split.outcome.tokens_per_second >= WORTH * best)
    return Plan(splits=splits, proposed=proposed)


def _within_the_bound(job: Job, wishes: Wishes, prepared: Prepared) -> list[Candidate]:
    """The phase's policy with every K up to its own that it admits."""
    phase, (own,) = rollout_phase(job, wishes.phase), prepared.candidates
    found: list[Candidate] = []
    for versions in range(own.policy.max_staleness):
        try:
            found += candidates(phase, [f"{phase.staleness.use}:{versions}"])
        except StalenessError:  # delayed_update, for example, is nothing but K = 1
            continue
    return [*found, own]


def _best(at: Scenario, candidate: Candidate, devices: int, trainer_devices: int) -> Split:
    tried: dict[int, Split] = {}

    def throughput(rollout: int) -> float:
        if not 0 < rollout < devices:
            return 0.0
        if rollout not in tried:
            there = _divided(at, rollout, devices, trainer_devices)
            outcome = Simulation(there, candidate).run()
            tried[rollout] = Split(rollout=rollout, trainer=devices - rollout, outcome=outcome)
        return tried[rollout].outcome.tokens_per_second

    here = _balanced(at, candidate.policy.max_staleness, devices, trainer_devices)
    while True:
        best = max((here, here - 1, here + 1), key=throughput)
        if best == here:
            return tried[here]
        here = best


def _divided(at: Scenario, rollout: int, devices: int, trainer_devices: int) -> Scenario:
    speed = (devices - rollout) / trainer_devices
    costs = at.costs.model_copy(
        update={
            "train_seconds": at.costs.train_seconds / speed,
            "train_seconds_per_token": at.costs.train_seconds_per_token / speed,
        }
    )
    return replace(at, instances=rollout, costs=costs)


def _balanced(at: Scenario, max_staleness: int, devices: int, trainer_devices: int) -> int:
    """Where the step takes least if nothing waits for a long trajectory."""
    rows = at.batch_groups * at.group_size
    tokens = rows * sum(map(at.trajectories.tokens, range(_SAMPLED))) / _SAMPLED

    def least(rollout: int) -> float:
        there = _divided(at, rollout, devices, trainer_devices)
        training = there.costs.train_seconds + there.costs.train_seconds_per_token * (
            tokens + rows * at.costs.prompt_tokens
        )
        return bound(rollout=tokens / there.full_rate, training=training, longest=0.0, max_staleness=max_staleness)

    return min(range(1, devices), key=least)


# ---------------------------------------------------------------- results


def plan_as_text(found: Plan) -> str:
    """A line per K, and the proposal."""
    lines = [
        f"K = {split.outcome.max_staleness}: {split.rollout} roll out, {split.trainer} train: "
        f"{split.outcome.step_seconds:.4g} s per step, {split.outcome.tokens_per_second:,.0f} tokens/s, "
        f"trainer waits {split.outcome.rollout_only_share:.0%}"
        for split in found.splits
    ]
    split = found.proposed
    lines.append(
        f"proposed: rollout.instances = {split.rollout}, {split.trainer} for the trainer, "
        f"staleness.max_staleness = {split.outcome.max_staleness}"
    )
    return "\n".join(lines)


def plan_as_plain(found: Plan) -> dict[str, Any]:
    """For ``--json``."""
    return asdict(found)
