"""The job file: TOML to a validated, frozen :class:`Job`, and the checks that come before anything starts.

It knows tables, plugins' settings and declared capabilities; it starts nothing. Invariant: a job without error
findings can be wired; a key that nothing reads is refused, and every message says where a value was written.
"""

from headrace.config.checks import check_job
from headrace.config.findings import Finding, JobErrors, raise_errors
from headrace.config.loading import load_job, load_resolved
from headrace.config.schema import (
    BatchConfig,
    CheckpointConfig,
    EnvironmentConfig,
    EvaluationConfig,
    Job,
    JobConfig,
    ModelConfig,
    Phase,
    PluginConfig,
    RolloutConfig,
    SimulationConfig,
    TrainerConfig,
    Until,
)
from headrace.config.toml import dumps
from headrace.config.transports import transport_of

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "Finding",
    "Job",
    "JobConfig",
    "JobErrors",
    "ModelConfig",
    "Phase",
    "PluginConfig",
    "RolloutConfig",
    "SimulationConfig",
    "TrainerConfig",
    "Until",
    "check_job",
    "dumps",
    "load_job",
    "load_resolved",
    "raise_errors",
    "transport_of",
]
