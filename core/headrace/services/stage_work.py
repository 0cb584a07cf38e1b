"""What a separate stage computes: pure functions of rows, on one thread.

Invariant: the columns of a row, or of a group, do not depend on what it came with, in lockstep to the bit, so that it
does not matter how rows were leased, nor whether they are done a second time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from headrace.contract import Algorithm, Batch, Column, Metric, TrainingContext, TrainingEngine
from headrace.contract.columns import ADVANTAGES, GROUP, LOSS_WEIGHTS, REFERENCE_LOGPROBS
from headrace.flow.stages import ADVANTAGE, REFERENCE
from headrace.registry import build
from headrace.services.low_bit import build_scheme
from headrace.services.prepared import prepared
from headrace.services.scored import group_passes, row_passes, scored
from headrace.services.stage_messages import StagePhase, StageSetup


class Done(NamedTuple):
    """``metrics``: by group, where the stage has any."""

    columns: Mapping[str, Column]
    metrics: dict[int, dict[str, Metric]]


class StageWork(ABC):
    """One phase's work of a stage."""

    @abstractmethod
    def compute(self, batch: Batch) -> Done:
        """The stage's columns of rows that were leased together."""

    def close(self) -> None:  # noqa: B027 - some have nothing to free
        """Free everything."""


class Reference(StageWork):
    """Log-probs of the weights that the phase starts from, under an engine of the trainer's kind that never trains."""

    def __init__(self, phase: StagePhase, setup: StageSetup) -> None:
        engine = build(phase.engine)
        assert isinstance(engine, TrainingEngine)
        self._engine = engine
        self._phase = phase
        engine.start(
            TrainingContext(
                name=REFERENCE,
                model_path=phase.model_path,
                seed=setup.seed,
                threads=setup.threads,
                total_steps=1,
                quantization=build_scheme(setup.quantization),
            )
        )

    def compute(self, batch: Batch) -> Done:
        phase, every = self._phase, np.ones(len(batch), dtype=np.bool_)
        passes = (group_passes if phase.lockstep else row_passes)(batch, every, token_budget=phase.tokens)
        found = scored(self._engine, batch, passes, weights="current", temperature=phase.temperature)
        return Done({REFERENCE_LOGPROBS: found}, {})

    def close(self) -> None:
        self._engine.close()


class Advantage(StageWork):
    """The algorithm's loss weights and advantages, group by group."""

    def __init__(self, phase: StagePhase, setup: StageSetup) -> None:
        algorithm = build(phase.algorithm)
        assert isinstance(algorithm, Algorithm)
        self._algorithm = algorithm
        self._writes = phase.writes

    def compute(self, batch: Batch) -> Done:
        groups = batch.dense(GROUP)
        found: list[Batch] = []
        metrics: dict[int, dict[str, Metric]] = {}
        for group in dict.fromkeys(groups.tolist()):
            part = batch.take(np.flatnonzero(groups == group))
            columns, metrics[group] = prepared(self._algorithm, part)
            if ADVANTAGES not in columns:  # its loss reads none
                weights = part.with_columns(columns).ragged(LOSS_WEIGHTS)
                columns[ADVANTAGES] = weights.like(np.zeros_like(weights.values))
            found.append(Batch(rows=part.rows, columns={name: columns[name] for name in self._writes}))
        return Done(Batch.concatenate(found).columns, metrics)


WORK: Mapping[str, Callable[[StagePhase, StageSetup], StageWork]] = {REFERENCE: Reference, ADVANTAGE: Advantage}
"""Stage → what it does."""
