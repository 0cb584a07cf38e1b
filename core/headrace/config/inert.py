"""Settings that a job writes and nothing reads: each deserves a warning, none an error.

Invariant: only what the job says itself is warned about, never a default.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.config.loading import PHASE_TABLES, core_keys
from headrace.config.schema import Job
from headrace.contract import AlgorithmNeeds
from headrace.errors import ConfigError
from headrace.validation import Path as KeyPath

_SWITCHES = {"evaluation": ("prompts", "greedy", "sampled")}
"""Table with an ``every`` that switches it off at 0 → keys that then mean nothing."""


def inert_settings(job: Job, needs: Sequence[AlgorithmNeeds | None]) -> list[ConfigError]:
    """``needs``: of each phase's algorithm, None where unknown."""
    return [
        *_switched_off(job),
        *_without_rollout(job, needs),
        *_replaced(job),
        *_overridden(job),
        *_no_modes(job),
        *_without_tcp(job),
        *_without_dynamic_sampling(job),
    ]


def _evaluates(job: Job) -> bool:
    return job.evaluation.every > 0 or any(phase.until and phase.until.every for phase in job.phases)


def _warning(job: Job, message: str, path: KeyPath, fix: str) -> ConfigError:
    return ConfigError(message, origin=job.origin(path), fix=fix)


def _switched_off(job: Job) -> list[ConfigError]:
    return [
        _warning(job, f"{key} is ignored: {table}.every is 0", (table, key), f"set {table}.every, or remove it")
        for table, keys in _SWITCHES.items()
        if not getattr(job, table).every and not (table == "evaluation" and _evaluates(job))
        for key in keys
        if job.written((table, key))
    ]


def _without_rollout(job: Job, needs: Sequence[AlgorithmNeeds | None]) -> list[ConfigError]:
    if any(need is None for need in needs):
        return []
    rollouts = [need.rollout for need in needs if need is not None]
    warnings = [
        _warning(
            job,
            f"staleness is ignored: {job.phases[index].algorithm.use} learns from demonstrations, never stale",
            ("phase", index, "staleness"),
            "remove it",
        )
        for index, rollout in enumerate(rollouts)
        if not rollout and job.written(("phase", index, "staleness"))
    ]
    if not any(rollouts) and not _evaluates(job):
        message = "rollout is ignored: no phase generates and evaluation is off"
        warnings.append(_warning(job, message, ("rollout",), "set evaluation.every to see what the model learns"))
    return warnings


def replaced(job: Job) -> list[str]:
    """Tables that phases share and whose plugin every phase replaces by another."""
    return [
        table
        for table, (_, key, _) in PHASE_TABLES.items()
        if job.written((table, key)) and all(getattr(p, table).use != job.value((table, key)) for p in job.phases)
    ]


def _replaced(job: Job) -> list[ConfigError]:
    return [
        _warning(job, f"{table} is ignored: every phase has another", (table,), "remove it") for table in replaced(job)
    ]


def overridden(job: Job, table: str) -> list[str]:
    """Settings of a table that phases share, which every phase replaces."""
    shared = job.value((table,))
    if not isinstance(shared, dict):
        return []
    use = PHASE_TABLES[table][1]
    phases = [getattr(phase, table).use for phase in job.phases]
    return [
        key
        for key in sorted(set(shared) - core_keys(table))
        if all(
            job.value(("phase", index, table, key)) is not None or chosen != shared.get(use, chosen)
            for index, chosen in enumerate(phases)
        )
    ]


def _overridden(job: Job) -> list[ConfigError]:
    return [
        _warning(job, f"{table}.{key} is ignored: every phase sets its own", (table, key), "remove it")
        for table in PHASE_TABLES
        for key in overridden(job, table)
    ]


def _no_modes(job: Job) -> list[ConfigError]:
    evaluation = job.evaluation
    if not _evaluates(job) or evaluation.greedy or evaluation.sampled:
        return []
    message = "evaluation measures nothing: greedy and sampled are both false"
    return [_warning(job, message, ("evaluation",), "set one of them to true, or every = 0")]


def _without_tcp(job: Job) -> list[ConfigError]:
    path: KeyPath = ("network", "host")
    if job.network.transport == "tcp" or not job.written(path):
        return []
    return [_warning(job, "host is ignored: ipc sockets have none", path, 'set network.transport = "tcp"')]


def _without_dynamic_sampling(job: Job) -> list[ConfigError]:
    key = "max_generated_batches"
    path: KeyPath = ("batch", key)
    if any(phase.batch.dynamic_sampling for phase in job.phases) or not job.written(path):
        return []
    return [_warning(job, f"{key} is ignored: no phase samples dynamically", path, "set dynamic_sampling = true")]
