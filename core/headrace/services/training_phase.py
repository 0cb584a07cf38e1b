"""A phase in the trainer: an engine with the algorithm that feeds it, and batches that come whole or in parts.

A batch in order: a critic's values where the algorithm compares with them → its advantages and loss weights, and
reference log-probs where the loss reads them, unless these stages have processes of their own, whose columns are there
by then → proximal log-probs → mini-batches (one optimiser step each) of micro-batches (sums that are scaled once). A
batch that comes whole is cut so that every mini-batch has an equal share of every group. One that streams has whole
groups in each, in the order in which they came: a mini-batch is computed as its groups come, and its step taken with
the last of them. Invariant: the numbers of a row do not depend on which rows it came with, but those of an algorithm
that needs the whole batch, which comes whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headrace import clock
from headrace.contract import (
    Algorithm,
    Array,
    Batch,
    Column,
    ForwardOutput,
    LossSpec,
    Metric,
    Ragged,
    Snapshots,
    StepResult,
    TrainingEngine,
    TrainingStep,
    merge_metrics,
)
from headrace.contract.columns import (
    DENOMINATOR,
    GREEDY,
    GROUP,
    LOSS_MASK,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    REWARD,
    TOKEN_VERSIONS,
    TOKENS,
    TRAINED,
    VALUES,
    VERSION,
)
from headrace.flow.batching import micro_batches, mini_batches
from headrace.flow.stages import ADVANTAGE, REFERENCE
from headrace.services.dumps import dump
from headrace.services.messages import PhaseSetup, Probe, TrainReply
from headrace.services.prepared import prepared
from headrace.services.scored import group_passes, row_passes, scored

PROXIMAL = "proximal"
"""Name of a snapshot of weights, as ``REFERENCE`` is."""


@dataclass(slots=True)
class _Open:
    """A mini-batch whose step is not taken yet."""

    step: TrainingStep
    parts: list[Batch] = field(default_factory=list)
    groups: int = 0
    denominator: float = 0.0


@dataclass(slots=True)
class _Trained:
    """What is known of the batch in training, part by part."""

    version: int
    started: float = field(default_factory=clock.now)
    rows: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    metrics: list[Mapping[str, Metric]] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    dumped: list[str] = field(default_factory=list)
    tokens: int = 0


class TrainingPhase:
    """An engine with the algorithm that feeds it. Methods run on the engine thread."""

    def __init__(self, engine: TrainingEngine, algorithm: Algorithm, setup: PhaseSetup, *, dumps: Path) -> None:
        self.engine = engine
        self._dumps = dumps
        self.setup = setup
        self._algorithm = algorithm
        self._needs = algorithm.needs(algorithm.settings)
        self._loss: LossSpec = algorithm.loss(temperature=setup.temperature)
        self._trained: _Trained | None = None
        self._open: _Open | None = None

    def freeze_reference(self) -> None:
        if REFERENCE in self.setup.stages:
            assert isinstance(self.engine, Snapshots)
            self.engine.snapshot(REFERENCE)

    def score(self, probe: Probe) -> Array:
        """float32 [T]: log-probs of the probe's tokens, 0 for the first."""
        known = np.arange(len(probe.tokens)) > 0
        columns: dict[str, Column] = {
            TOKENS: Ragged.from_arrays([probe.tokens]),
            LOSS_MASK: Ragged.from_arrays([known]),
        }
        batch = Batch(rows=np.zeros(1, dtype=np.int64), columns=columns)
        return self.engine.forward(batch, temperature=probe.temperature)["logprobs"][0]

    def train(self, batch: Batch | None, version: int, *, last: bool) -> TrainReply:
        """A batch, or a part of it (None: nothing more). What came of it so far: all, when it is the ``last``."""
        if self._trained is None:
            self._begin(version)
        assert self._trained is not None
        if batch is not None:
            prepared, trained = self._prepare(batch)
            for part, mask in self._mini_batches(prepared, trained):
                self._accumulate(part, mask)
        reply = self._reply(self._trained)
        if last:
            self._trained = None
        return reply

    def _begin(self, version: int) -> None:
        self._trained = _Trained(version)
        if (self._needs.proximal_logprobs or self._needs.values) and self._takes_steps_between:
            assert isinstance(self.engine, Snapshots)
            self.engine.snapshot(PROXIMAL)

    @property
    def _takes_steps_between(self) -> bool:
        """Whether weights may change before the last part of a batch comes."""
        return self.setup.streaming and self.setup.mini_batches > 1

    def _prepare(self, batch: Batch) -> tuple[Batch, np.ndarray]:
        assert self._trained is not None
        known = self._trained
        known.rows += batch.rows.tolist()
        known.rewards += batch.dense(REWARD).tolist()
        if self._needs.values:
            batch = batch.with_columns({VALUES: self._at_start(batch, np.ones(len(batch), bool), output="values")})
        if ADVANTAGE in self.setup.stages:
            columns, metrics = prepared(self._algorithm, batch)
            batch = batch.with_columns(columns)
            known.metrics.append(metrics)
        if GREEDY in batch.columns:  # their rewards are in the advantages by now
            batch = batch.take(np.flatnonzero(~batch.dense(GREEDY)))
        trained = batch.dense(TRAINED)
        known.metrics.append(_staleness_metrics(known.version, batch))
        used = zip(batch.ragged(LOSS_MASK), trained, strict=True)
        known.tokens += sum(int(mask.sum()) for mask, counts in used if counts)
        return self._with_policy_logprobs(batch, trained), trained

    def _with_policy_logprobs(self, batch: Batch, trained: np.ndarray) -> Batch:
        """Proximal and reference log-probs, from before the batch's first step. No loss ever reads those of rows that
        are not trained."""
        setup, budget = self.setup, self.setup.micro_batch_tokens
        found: dict[str, Column] = {}
        if self._needs.proximal_logprobs:
            found[PROXIMAL_LOGPROBS] = self._at_start(batch, trained, output="logprobs")
        if REFERENCE in setup.stages:
            passes = (group_passes if setup.lockstep else row_passes)(batch, trained, token_budget=budget)
            found[REFERENCE_LOGPROBS] = scored(
                self.engine, batch, passes, weights=REFERENCE, temperature=setup.temperature
            )
        return batch.with_columns(found)

    def _at_start(self, batch: Batch, wanted: np.ndarray, *, output: ForwardOutput) -> Ragged:
        """Of the rows ``wanted`` (bool [n]), by the weights from before the batch's first step."""
        weights = PROXIMAL if self._takes_steps_between else "current"
        passes = row_passes(batch, wanted, token_budget=self.setup.micro_batch_tokens)
        return scored(self.engine, batch, passes, weights=weights, temperature=self.setup.temperature, output=output)

    def _mini_batches(self, batch: Batch, trained: np.ndarray) -> Iterator[tuple[Batch, np.ndarray]]:
        """What goes into one mini-batch after another; of a stream, the first part may go on where the last ended."""
        if not self.setup.streaming:
            for rows in mini_batches(batch.dense(GROUP), count=self.setup.mini_batches):
                yield batch.take(rows), trained[rows]
            return
        groups = batch.dense(GROUP)
        order = list(dict.fromkeys(groups.tolist()))
        while order:
            chosen, order = order[: self._missing], order[self._missing :]
            rows = np.flatnonzero(np.isin(groups, chosen))
            yield batch.take(rows), trained[rows]

    @property
    def _missing(self) -> int:
        """Groups until the step of a stream's mini-batch."""
        whole = self.setup.groups // self.setup.mini_batches
        return whole - (self._open.groups if self._open is not None else 0)

    def _accumulate(self, batch: Batch, trained: np.ndarray) -> None:
        """Into the open mini-batch; take its step when it is whole."""
        if self._open is None:
            self._open = _Open(self.engine.begin_step(self._loss))
        opened = self._open
        lengths, budget = batch.ragged(TOKENS).lengths, self.setup.micro_batch_tokens
        try:
            for rows in micro_batches(lengths, token_budget=budget, rows=np.flatnonzero(trained)):
                opened.step.accumulate(batch.take(rows))
            opened.parts.append(batch)
            opened.groups += len(np.unique(batch.dense(GROUP)))
            opened.denominator += float(batch.dense(DENOMINATOR).sum())
            if self.setup.streaming and self._missing:
                return
            result = opened.step.finish(denominator=opened.denominator)
        except BaseException:  # whatever ended the step, the next one must be able to begin; raised again
            opened.step.discard()
            self._open = None
            raise
        self._open = None
        self._record(opened, result)

    def _record(self, opened: _Open, result: StepResult) -> None:
        assert self._trained is not None
        known = self._trained
        if not math.isfinite(result.loss) or not math.isfinite(result.gradient_norm):
            name = f"version-{known.version:08d}-step-{len(known.results)}"
            known.dumped.append(dump(Batch.concatenate(opened.parts), self._dumps, name))
        known.results.append(result)

    def _reply(self, known: _Trained) -> TrainReply:
        by_row = sorted(zip(known.rows, known.rewards, strict=True), key=lambda pair: pair[0])
        return TrainReply(
            applied=sum(r.applied for r in known.results),
            skipped=sum(not r.applied for r in known.results),
            dumped=[path for path in known.dumped if path],
            metrics=merge_metrics([*known.metrics, *(_step_metrics(r) for r in known.results)]),
            tokens=known.tokens,
            rewards=[reward for _, reward in by_row],
            started=known.started,
            finished=clock.now(),
        )


def _step_metrics(result: StepResult) -> dict[str, Metric]:
    """An optimiser step's own numbers beside its loss function's. Non-finite ones are counted, not averaged."""
    own = {"train/skipped_steps": Metric(total=float(not result.applied), reduction="sum")}
    if result.applied:
        own |= {
            "train/loss": Metric(total=result.loss),
            "train/gradient_norm": Metric(total=result.gradient_norm),
            "train/learning_rate": Metric(total=result.learning_rate),
        }
    return {**result.metrics, **own}


def _staleness_metrics(version: int, batch: Batch) -> dict[str, Metric]:
    """Of rows, by their oldest tokens; and of tokens, where those of a row may differ."""
    rows = version - batch.dense(VERSION)
    metrics = {
        "staleness/mean": Metric(total=float(rows.sum()), count=float(len(rows))),
        "staleness/max": Metric(total=float(rows.max()), reduction="max"),
    }
    if TOKEN_VERSIONS not in batch.columns:
        return metrics
    versions, oldest = batch.ragged(TOKEN_VERSIONS), batch.dense(VERSION)
    sampled = versions.values >= 0
    mixed = [int(own.max(initial=first)) > first for own, first in zip(versions, oldest, strict=True)]
    metrics["staleness/mixed_share"] = Metric(total=float(sum(mixed)), count=float(len(mixed)))
    if count := float(sampled.sum()):
        masked = sampled & ~batch.ragged(LOSS_MASK).values
        ages = version - versions.values[sampled]
        metrics["staleness/token_mean"] = Metric(total=float(ages.sum()), count=count)
        metrics["staleness/masked_share"] = Metric(total=float(masked.sum()), count=count)
    return metrics
