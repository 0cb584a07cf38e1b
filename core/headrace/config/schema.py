"""What a job is: frozen models of the job file's tables.

A table that selects a plugin holds core's own keys, which are fields here, next to the plugin's keys, which are in
``spec.settings``. Paths are absolute.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from headrace.config.sources import Sources
from headrace.registry import PluginSpec, absolute
from headrace.validation import Path as KeyPath

Count = Annotated[int, Field(ge=1, le=10**6)]
Large = Annotated[int, Field(ge=1, le=10**9)]
"""Of tokens or batches."""
Share = Annotated[float, Field(ge=0, le=1)]
Few = Annotated[int, Field(ge=1, le=1024)]
"""Processes or threads of one machine."""
Period = Annotated[int, Field(ge=0, le=10**9)]
"""Every so many versions; 0: never."""
Size = Annotated[int, Field(ge=0, le=10**9)]
"""Of something that may be absent."""
Cost = Annotated[float, Field(ge=0)]
"""Seconds."""
Text = Annotated[str, Field(min_length=1)]


class Table(BaseModel):
    """Frozen; unknown keys are refused, and numbers without end."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class JobConfig(Table):
    """``[job]``."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Part of the run directory's name."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    runs: Text = "runs"
    """Folder of the run directories, relative to where the command is given."""


class ModelConfig(Table):
    """``[model]``: an existing model or a fresh one."""

    path: str | None = None
    """A Hugging Face-format directory."""
    scratch: dict[str, Any] | None = None
    """Settings of a randomly initialised model; the training engine knows them."""

    @model_validator(mode="after")
    def _one_of_both(self) -> ModelConfig:
        if (self.path is None) == (self.scratch is None):
            both = self.path is not None
            found = "both path and scratch" if both else "neither path nor scratch"
            raise ValueError(f"model has {found}; exactly one of them says where the model comes from")
        return self


class PluginConfig(Table):
    """A table that holds nothing but a plugin: ``[weights]``."""

    spec: PluginSpec


class StorageConfig(PluginConfig):
    """``[storage]``."""

    units: Few = 1
    """Processes that keep rows."""
    capacity: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Bytes that each of them keeps before new rows wait; 0: no bound."""


class LauncherConfig(PluginConfig):
    """``[launcher]``."""

    max_restarts: Annotated[int, Field(ge=0, le=10**6)] = 5
    """How often a node that was lost is started again; a trainer only until it serves: without it the run ends, to be
    resumed."""


class EnvironmentConfig(PluginConfig):
    """``[environment]``."""

    workers: Few = 1
    """Processes that play episodes."""
    episode_deadline: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that an episode may neither wait for tokens nor end."""
    scoring_workers: Few = 1
    """Killable scoring processes per worker."""
    scoring_deadline: Annotated[float, Field(gt=0)] = 10.0
    """Seconds."""
    max_failed_share: Share = 0.5
    """The run stops when more than this of a batch's trajectories raised, hung or could not be scored; outside a phase,
    such as before the first batch, of an evaluation's answers."""
    max_attempts: Count = 3
    """How often a trajectory is started, when its episode raises or its node is lost, before its group is dropped and
    its task put in quarantine."""
    python: Text | None = None
    """Interpreter of the workers; None: the controller's own."""


class AutoscaleConfig(Table):
    """``[rollout.autoscale]``: instances join and leave by how busy they are. A run that begins with fewer or more than
    the bounds allow is brought within them first."""

    min: Few = 1
    max: Few

    @model_validator(mode="after")
    def _in_order(self) -> AutoscaleConfig:
        if self.min > self.max:
            raise ValueError(f"autoscale has min = {self.min} above max = {self.max}")
        return self


class RolloutConfig(PluginConfig):
    """``[rollout]``."""

    instances: Few = 1
    """At the start."""
    order: Literal["stream", "longest_first"] = "stream"
    """Of groups: as the environment's stream has them, or those first, after each publication, whose prompts took the
    longest answers before."""
    autoscale: AutoscaleConfig | None = None
    """None: only a person changes their number."""
    max_new_tokens: Large
    temperature: Annotated[float, Field(gt=0)] = 1.0
    python: Text | None = None
    threads: Few = 1
    """Compute threads per instance."""


class TrainerConfig(Table):
    """``[trainer]``, less the engine's settings, which belong to a phase."""

    use: str
    python: Text | None = None
    threads: Few = 1


class QuantizationConfig(PluginConfig):
    """``[quantization]``: weights are low-bit where answers are generated."""

    align: bool = True
    """The trainer computes with the low-bit weights as well, and trains those that they are made of; else it computes
    with the latter, and its log-probs differ from the rollout's."""


class BatchConfig(Table):
    """``[batch]``."""

    groups: Count
    """Prompts per training batch."""
    group_size: Count
    """Trajectories per prompt."""
    mini_batches: Count = 1
    """Optimiser steps per training batch."""
    micro_batch_tokens: Large = 8192
    """Tokens per forward and backward pass."""
    streaming: bool = False
    """Train on groups as they come, ahead of their batch. Mini-batches are whole groups then, in the order in which
    these came."""
    dynamic_sampling: bool = False
    """Groups whose rewards are all equal are dropped, and others generated in their place; where answers are
    generated."""
    max_generated_batches: Count = 10
    """Batches' worth of groups that may be generated for one batch under dynamic sampling, before the run stops."""


class StagesConfig(Table):
    """``[stages]``."""

    processes: bool = False
    """Reference log-probs and advantages are computed in processes of their own, as rows come, instead of in the
    trainer when it has a batch."""


class NetworkConfig(Table):
    """``[network]``: how the processes reach each other."""

    transport: Literal["ipc", "tcp"] = "ipc"
    """Sockets in a private directory, or ports of ``host`` that only holders of the run's keys can use."""
    host: str = "127.0.0.1"
    """IP address that nodes serve at under tcp."""
    metrics: str = ""
    """Where Prometheus finds the data plane's metrics: ``HOST:PORT``, or ``unix:PATH``; "": nowhere."""


class EvaluationConfig(Table):
    """``[evaluation]``."""

    every: Period = 0
    prompts: Count = 256
    greedy: bool = True
    sampled: bool = True


class CheckpointConfig(Table):
    """``[checkpoint]``."""

    every: Period = 25
    """Batches; 0: only when the run is asked to stop, and at the end of a phase."""
    keep: Count = 2
    """How many stay."""


class SimulationConfig(Table):
    """``[simulation]``: what things cost in ``headrace simulate``, in seconds and tokens. What a calibration has
    measured stands where the job writes nothing."""

    lengths: Text | None = None
    """Response lengths, as ``--lengths`` writes them."""
    prompts: Large | None = None
    """How many there are, asked again in turn; None: each is asked once."""
    alike: Share = 0.0
    """How much of the variance of lengths (of their normal scores) answers to the same prompt have in common."""
    prompt_tokens: Size = 0
    step_seconds: Annotated[float, Field(gt=0)] | None = None
    """A decode step of an instance that has one request."""
    step_seconds_per_request: Cost = 0.0
    """What each further request adds to a step."""
    prefill_seconds_per_token: Cost = 0.0
    request_seconds: Cost = 0.0
    """From a trajectory's dispatch until its instance has it, and from its last token until that is known, together."""
    kv_tokens: Large | None = None
    """What the KV cache of an instance holds; None: whatever its slots need."""
    scoring_seconds: Cost = 0.0
    """From a group's last token until its rows are stored."""
    train_seconds: Cost = 0.0
    """Of a batch, beside its tokens."""
    train_seconds_per_token: Cost = 0.0
    publish_seconds: Cost = 0.0
    """For which the trainer waits."""
    transfer_seconds: Cost = 0.0
    """From publication until an instance has the weights; it goes on decoding."""
    switch_seconds: Cost = 0.0
    """For which an instance that has the weights stops decoding."""
    move_seconds: Cost = 0.0
    """Of a request from one instance to another, beside its keys and values; it is not decoded meanwhile."""
    move_seconds_per_token: Cost = 0.0
    """What the keys and values of its context take, where engines hand them over; elsewhere they are computed again."""
    seconds_between_failures: Annotated[float, Field(gt=0)] | None = None
    """Of one instance, mean of an exponential distribution; None: none fails."""
    restart_seconds: Cost = 0.0
    """From an instance's failure until it is back, with no version."""


class Until(Table):
    """Ends a phase before its last step."""

    metric: str
    at_least: Share
    """An accuracy."""
    every: Count | None = None
    """Evaluate, in this phase, every so many versions; None: as ``[evaluation]`` says."""


class Phase(Table):
    """A stretch of training batches under one algorithm, batch size and staleness policy."""

    name: str
    steps: Large
    """Training batches, at most."""
    until: Until | None = None
    algorithm: PluginSpec
    trainer: PluginSpec
    staleness: PluginSpec
    batch: BatchConfig


class Job(Table):
    """A whole job, as the runner reads it."""

    job: JobConfig
    model: ModelConfig
    environment: EnvironmentConfig
    rollout: RolloutConfig
    trainer: TrainerConfig
    storage: StorageConfig
    weights: PluginConfig
    quantization: QuantizationConfig | None = None
    launcher: LauncherConfig
    stages: StagesConfig
    network: NetworkConfig
    observers: tuple[PluginSpec, ...]
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    simulation: SimulationConfig
    phases: Annotated[tuple[Phase, ...], Field(min_length=1)]
    directory: str
    """The job file's folder."""
    _sources: Sources = PrivateAttr(default_factory=lambda: Sources(file="job", data={}))

    def origin(self, *candidates: KeyPath) -> str:
        """Where the first of these keys that the job sets was written, for messages."""
        return self._sources.origin(*candidates)

    def written(self, path: KeyPath) -> bool:
        """Whether the job sets this key itself, rather than leaving it at its default."""
        return self._sources.written(path)

    def value(self, path: KeyPath) -> Any:
        """What the job file and the overrides say at ``path``, or None."""
        return self._sources.value(path)

    def resolved(self) -> dict[str, Any]:
        """The same job as the plain values of a job file with every default written out and paths absolute."""
        tables = {name: getattr(self, name) for name in ("environment", "rollout", "storage", "weights", "launcher")}
        return {
            "observers": [_selection(spec) for spec in self.observers],
            "job": self.job.model_dump(),
            "model": self.model.model_dump(exclude_none=True),
            **{name: {**_selection(t.spec), **t.model_dump(exclude={"spec"})} for name, t in tables.items()},
            "quantization": _quantization(self.quantization),
            "trainer": {**self.trainer.model_dump(), "use": _selection(self.phases[0].trainer)["use"]},
            "stages": self.stages.model_dump(),
            "network": self.network.model_dump(),
            "evaluation": self.evaluation.model_dump(),
            "checkpoint": self.checkpoint.model_dump(),
            "simulation": self.simulation.model_dump(exclude_unset=True),
            "phase": [_phase(phase) for phase in self.phases],
        }


def _quantization(table: QuantizationConfig | None) -> dict[str, Any] | None:
    if table is None:
        return None
    selection = _selection(table.spec)
    return {"scheme": selection.pop("use"), "align": table.align, **selection}


def _phase(phase: Phase) -> dict[str, Any]:
    staleness = _selection(phase.staleness)
    return {
        "name": phase.name,
        "steps": phase.steps,
        "until": phase.until.model_dump() if phase.until else None,
        "algorithm": _selection(phase.algorithm),
        "batch": phase.batch.model_dump(),
        "staleness": {"policy": staleness.pop("use"), **staleness},
        "trainer": dict(phase.trainer.settings),
    }


def _selection(spec: PluginSpec) -> dict[str, Any]:
    """A plugin's table, meaning the same from any folder."""
    return {"use": absolute(spec.use, directory=spec.directory), **spec.settings}
