"""Every message between the controller and its nodes, typed. Arrays appear only in batches, episodes and
generation requests, which travel straight between the nodes that make and use them."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.contract import Array, FinishReason, Interruption, Metric, SaveKind, Split, WeightManifest
from headrace.registry import PluginSpec


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base: immutable, fields by name."""


# ---------------------------------------------------------------- rollout nodes


class RolloutSetup(Message, frozen=True):
    """How a rollout node starts its engine. ``quantization``: the scheme that weights arrive in, where there is one."""

    engine: PluginSpec
    transport: PluginSpec
    model_path: str
    publisher: str
    """Address of the trainer's weight publisher."""
    threads: int
    quantization: PluginSpec | None = None


class Probe(Message, frozen=True):
    """Tokens whose log-probs show which weights somebody has."""

    tokens: Array
    """int32 [T]."""
    temperature: float


class LoadCall(Message, frozen=True):
    """Fetch, verify and commit a version, and score the probe with it, where there is one."""

    version: int
    probe: Probe | None
    interruption: Interruption | None = None
    """Set where a SwitchCall follows: an engine with room for one version lets go of what is unfinished until then."""


class VersionLoaded(Message, frozen=True):
    """An instance has verified and committed a version. ``nbytes``: of all tensors, or of all but a base it had."""

    version: int
    digest: str
    transfer_seconds: float
    """Until all of it was fetched and staged. Nothing stands still for that."""
    logprobs: Array | None
    """float32 [T], of the probe; None without one, and from an engine that does not score."""
    nbytes: int = 0


# ---------------------------------------------------------------- trainer node


class TrainerSetup(Message, frozen=True):
    """What a trainer node needs before its first phase. ``align``: it computes in the scheme that it publishes in."""

    transport: PluginSpec
    ledger: str
    """Where the ledger of the data plane is."""
    threads: int
    seed: int
    dumps: str
    """Folder for the rows of steps that were not finite."""
    quantization: PluginSpec | None = None
    align: bool = False


class ScratchModel(Message, frozen=True):
    """Create a model directory."""

    engine: PluginSpec
    path: str
    settings: dict[str, Any]
    seed: int


class PhaseSetup(Message, frozen=True):
    """Start a phase: a fresh engine on ``model_path`` with the phase's settings."""

    engine: PluginSpec
    algorithm: PluginSpec
    model_path: str
    total_steps: int
    temperature: float
    stages: tuple[str, ...]
    """Which of the stages that can have processes of their own the trainer does itself."""
    groups: int
    """Of a training batch."""
    streaming: bool
    lockstep: bool
    """Of the phase's staleness policy: every number is the same to the bit in every run."""
    mini_batches: int
    micro_batch_tokens: int


class TrainCall(Message, frozen=True):
    """Train one batch: whole groups, row ids ascending. ``units``: int16 [rows, columns], which storage unit has each
    of ``columns``."""

    version: int
    last: bool
    """False: these are a part of the batch, and others follow."""
    partition: str
    rows: Array
    columns: tuple[str, ...]
    units: Array


class TrainReply(Message, frozen=True):
    """What a training batch did: how many optimiser steps it took, and skipped because loss or gradient was not finite;
    ``dumped`` are the files that hold the rows of these."""

    applied: int
    skipped: int
    dumped: list[str]
    metrics: dict[str, Metric]
    tokens: int
    """Sampled tokens of the rows that were trained."""
    rewards: list[float]
    """Of every row in the order asked for, as read from storage; NaN when it was not scored."""
    started: float
    finished: float


class RestoreCall(Message, frozen=True):
    """Load a ``resume`` save."""

    path: str


class PublishCall(Message, frozen=True):
    """Publish the current weights as a version, and score the probe with them, where there is one."""

    version: int
    probe: Probe | None


class Published(Message, frozen=True):
    """A version is there for receivers."""

    manifest: WeightManifest
    logprobs: Array | None
    """float32 [T], of the probe; None without one."""


class SaveCall(Message, frozen=True):
    """Write weights to a directory."""

    path: str
    kind: SaveKind


class VersionCall(Message, frozen=True):
    """Anything about one policy version."""

    version: int


# ---------------------------------------------------------------- environment workers


class WorkerSetup(Message, frozen=True):
    """What an environment worker needs."""

    environment: PluginSpec
    model_path: str
    seed: int
    ledger: str
    episode_deadline: float
    scoring_workers: int
    scoring_deadline: float
    python: str
    log_path: str


class Member(Message, frozen=True):
    """One trajectory of a work item."""

    trajectory: int
    task: int
    """Index in the environment's stream."""
    instance: str
    """Address of the rollout instance; empty for demonstrations, and for a trajectory whose instance was lost."""
    seed: int
    attempt: int = 0
    cohort: str = ""
    cohort_size: int = 0
    greedy: bool = False


ItemKey = tuple[str, int]


class WorkItem(Message, frozen=True):
    """One group to roll out, demonstrate, or (``evaluation``) a set of held-out tasks to answer."""

    kind: str
    """``rollout``, ``demonstration`` or ``evaluation``."""
    group: int
    """Group id; for evaluation the work item's number."""
    version: int
    split: Split
    members: list[Member]
    max_new_tokens: int
    temperature: float
    greedy: bool = False
    partition: str = ""
    """Of the data plane, where the group's rows belong; held-out answers belong nowhere."""
    columns: tuple[str, ...] = ()
    """What is stored of each row; ``by_row``: when its answer is scored, rather than with its whole group."""
    by_row: bool = False
    mask_older: bool = False
    """Whether of a row only tokens of its newest version are trained."""

    @property
    def key(self) -> ItemKey:
        """What a report about this item is matched by."""
        return item_key(self.group, evaluation=self.kind == "evaluation")


def item_key(number: int, *, evaluation: bool) -> ItemKey:
    """The key of a group's item, or of an evaluation item."""
    return ("evaluation" if evaluation else "group", number)


class WorkRequest(Message, frozen=True):
    """A worker (the id of its process) asks for work; answered when there is some, or with None after a while."""

    worker: str


class PlaceCall(Message, frozen=True):
    """A worker asks where a trajectory goes on, whose instance is gone; answered when its version is served."""

    worker: str
    version: int
    group: int
    trajectory: int
    instance: str
    """Address where nobody answers any more; "" when the trajectory had no place yet."""
    attempt: int
    """The try that was made there."""
    evaluation: bool


class Placement(Message, frozen=True):
    """Where a trajectory goes on."""

    instance: str
    """Address."""
    attempt: int
    """The try to make there: the one before, where the trajectory had moved there in time."""


class PeerCall(Message, frozen=True):
    """About another node that is lost."""

    address: str


class CancelGroups(Message, frozen=True):
    """Groups nobody wants any more; a worker forgets those it is working on."""

    groups: list[int]


class TrajectoryFinished(Message, frozen=True, tag=True):
    """A trajectory's tokens are done; it is not scored yet."""

    group: int
    trajectory: int
    spans: list[tuple[int, int, int]]
    """(version, start, stop) in response coordinates, as the engine reported them."""
    prompt_tokens: int
    response_tokens: int
    finish_reason: FinishReason
    started: float
    finished: float


class Scored(Message, frozen=True, tag=True):
    """Some answers have been scored, or could not be; said early, since scores that run into their deadline are slow
    news."""

    trajectories: int
    unscored: dict[str, int] = {}
    """Those that could not be, by reason."""
    detail: str = ""
    """Traceback of the first of them."""


class ScorerLost(Message, frozen=True, tag=True):
    """A scoring process ended by itself, or gave no score in time and was killed; another takes its place."""

    node: str
    """Of its environment worker."""
    reason: str


class GroupFailed(Message, frozen=True, tag=True):
    """A group that cannot become rows."""

    group: int
    trajectory: int
    reason: str
    detail: str
    """The error's text, with traceback where there is one."""


class EvaluationSample(Message, frozen=True):
    """One held-out answer."""

    task: int
    prompt: str
    answer: str
    reward: float
    correct: bool


class EvaluationDone(Message, frozen=True, tag=True):
    """Answers of one evaluation work item."""

    item: int
    greedy: bool
    versions: list[int]
    """Every version in any span; more than the pinned one is an engine's fault."""
    failed: dict[str, int]
    """Answers that could not be scored, by reason; they count as wrong."""
    samples: list[EvaluationSample]


Entry = TrajectoryFinished | Scored | ScorerLost | GroupFailed | EvaluationDone


class Report(Message, frozen=True):
    """What happened at a worker (the id of its process) since its last report, in order."""

    worker: str
    entries: list[Entry]
