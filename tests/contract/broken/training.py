"""Training engines that break one rule each; ``breaks`` names the rule's test."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.contract import (
    Array,
    Batch,
    LossSpec,
    Ragged,
    SaveKind,
    StepResult,
    TrainingCapabilities,
    TrainingContext,
    TrainingEngine,
    TrainingStep,
    WeightSource,
)
from headrace.contract.columns import LOSS_MASK, LOSS_WEIGHTS
from headrace.errors import ConfigError, EngineError
from headrace.testing import FakeTrainingEngine
from headrace.testing.bigram import CRITIC, Bigram
from headrace.testing.suites import TrainingEngineContract
from headrace.testing.training import NOTES, SCRATCH, FakeTrainingStep, FakeWeightSource


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    FakeTrainingEngine.create_model(path, settings={}, seed=3)
    return path


class Broken(TrainingEngineContract):
    """Subclasses say which engine, or only which step it takes."""

    Kind: type[TrainingEngine]
    Step: type[FakeTrainingStep]

    @pytest.fixture
    def plugin(self) -> TrainingEngine:
        settings = FakeTrainingEngine.Settings()
        return self.Kind(settings) if hasattr(self, "Kind") else stepping(self.Step)(settings)

    @pytest.fixture
    def model_path(self, model: str) -> str:
        return model

    @pytest.fixture
    def scratch(self) -> Mapping[str, Any]:
        return {"vocabulary": 8}


def stepping(step: type[FakeTrainingStep]) -> type[FakeTrainingEngine]:
    """An engine that takes these steps."""

    class Stepping(FakeTrainingEngine):
        def begin_step(self, loss: LossSpec) -> TrainingStep:
            return step(self, loss)

    return Stepping


class TestDeclaresTooMuch(Broken):
    breaks = "test_declared_capabilities_are_backed"

    class Kind(TrainingEngine):
        """Has a fake inside, and none of its capabilities."""

        Settings = FakeTrainingEngine.Settings

        def __init__(self, settings: Any) -> None:
            super().__init__(settings)
            self.inner = FakeTrainingEngine(settings)

        @classmethod
        def capabilities(cls, settings: Any) -> TrainingCapabilities:
            return TrainingCapabilities(snapshots=True)

        def start(self, context: TrainingContext) -> None:
            self.inner.start(context)

        def forward(self, batch: Batch, **options: Any) -> Mapping[str, Ragged]:
            return self.inner.forward(batch, **options)

        def begin_step(self, loss: LossSpec) -> TrainingStep:
            return self.inner.begin_step(loss)

        def weight_source(self) -> WeightSource:
            return self.inner.weight_source()

        def save(self, path: str, *, kind: SaveKind) -> None:
            self.inner.save(path, kind=kind)

        def load(self, path: str) -> None:
            self.inner.load(path)

        def close(self) -> None:
            self.inner.close()


class TestMeasuresEverything(Broken):
    breaks = "test_outputs_are_aligned_and_0_outside_the_mask"

    class Kind(FakeTrainingEngine):
        def forward(self, batch: Batch, **options: Any) -> Mapping[str, Ragged]:
            found = dict(super().forward(batch, **options))
            if "entropy" in found:
                found["entropy"] = found["entropy"].like(found["entropy"].values + np.float32(1))
            return found


class TestIgnoresTheTemperature(Broken):
    breaks = "test_log_probs_are_of_a_tempered_distribution"

    class Kind(FakeTrainingEngine):
        def forward(self, batch: Batch, **options: Any) -> Mapping[str, Ragged]:
            return super().forward(batch, **{**options, "temperature": 1.0})


class TestMindsTheNeighbours(Broken):
    breaks = "test_a_row_does_not_depend_on_its_neighbours"

    class Kind(FakeTrainingEngine):
        def forward(self, batch: Batch, **options: Any) -> Mapping[str, Ragged]:
            found = super().forward(batch, **options)
            shift = np.float32(2e-4 * (len(batch) > 1))
            return {name: column.like(column.values - shift * (column.values != 0)) for name, column in found.items()}


class TestAveragesMicroBatches(Broken):
    breaks = "test_the_split_changes_neither_loss_nor_gradient"

    class Step(FakeTrainingStep):
        parts = 0

        def accumulate(self, batch: Batch) -> None:
            super().accumulate(batch)
            self.parts += bool(batch.ragged(LOSS_MASK).values.any())

        def finish(self, *, denominator: float) -> StepResult:
            return super().finish(denominator=denominator * max(self.parts, 1))


class TestIgnoresTheDenominator(Broken):
    breaks = "test_sums_are_divided_by_the_step_s_denominator"

    class Step(FakeTrainingStep):
        def finish(self, *, denominator: float) -> StepResult:
            return super().finish(denominator=32.0 if denominator else 0.0)


class TestReadsOutsideTheMask(Broken):
    breaks = "test_nothing_outside_the_mask_reaches_the_loss"

    class Step(FakeTrainingStep):
        def accumulate(self, batch: Batch) -> None:
            super().accumulate(batch)
            self.numerator += 0.0 * float(batch.ragged(LOSS_WEIGHTS).values.sum())


class TestCountsTheIdle(Broken):
    breaks = "test_a_batch_without_trainable_tokens_adds_nothing"

    class Step(FakeTrainingStep):
        def accumulate(self, batch: Batch) -> None:
            super().accumulate(batch)
            self.numerator += not batch.ragged(LOSS_MASK).values.any()


class TestAppliesNothing(Broken):
    breaks = "test_a_denominator_of_0_applies_nothing"

    class Step(FakeTrainingStep):
        def finish(self, *, denominator: float) -> StepResult:
            result = super().finish(denominator=denominator)
            return replace(result, applied=result.applied or denominator == 0)


class TestSkipsEmptySteps(Broken):
    breaks = "test_leaving_out_rows_equals_computing_them"

    class Step(FakeTrainingStep):
        parts = 0

        def accumulate(self, batch: Batch) -> None:
            super().accumulate(batch)
            self.parts += 1

        def finish(self, *, denominator: float) -> StepResult:
            return super().finish(denominator=denominator if self.parts else 0.0)


class TestKeepsTheDiscarded(Broken):
    breaks = "test_a_discarded_step_leaves_no_trace"

    class Kind(FakeTrainingEngine):
        leftover: Mapping[str, Array] = {}  # replaced, never changed

        def begin_step(self, loss: LossSpec) -> TrainingStep:
            class Step(FakeTrainingStep):
                def discard(step) -> None:  # the engine is self here
                    self.leftover = step.gradient

            step = Step(self, loss)
            step.gradient = {**step.gradient, **self.leftover}
            self.leftover = {}
            return step


class TestMovesOnNaN(Broken):
    breaks = "test_a_loss_that_is_not_finite_is_not_applied"

    class Step(FakeTrainingStep):
        def finish(self, *, denominator: float) -> StepResult:
            result = super().finish(denominator=denominator)
            if not math.isfinite(self.numerator):
                super().discard()
                self._apply(denominator)
            return result


class TestKeepsTheLastMetrics(Broken):
    breaks = "test_metrics_are_merged_by_their_reduction"

    class Step(FakeTrainingStep):
        def accumulate(self, batch: Batch) -> None:
            super().accumulate(batch)
            self._metrics = self._metrics[-1:]


class TestClimbs(Broken):
    breaks = "test_steps_lower_the_loss"

    class Kind(FakeTrainingEngine):
        def __init__(self, settings: Any) -> None:
            super().__init__(settings)
            self.learning_rate = -self.learning_rate


class TestGivesATensorTwice(Broken):
    breaks = "test_the_weight_source_gives_every_tensor_once"

    class Kind(FakeTrainingEngine):
        def weight_source(self) -> WeightSource:
            class Twice(FakeWeightSource):
                def tensors(self) -> Iterator[tuple[str, Array]]:
                    for item in super().tensors():
                        yield from (item, item)

            return Twice(self.policy.tensors)


class TestGivesTheFirstWeights(Broken):
    breaks = "test_the_weight_source_follows_training"

    class Kind(FakeTrainingEngine):
        first: Bigram

        def start(self, context: TrainingContext) -> None:
            super().start(context)
            self.first = self.policy.with_tensors({name: t.copy() for name, t in self.policy.tensors.items()})

        def weight_source(self) -> WeightSource:
            return FakeWeightSource(self.first.tensors)

        def save(self, path: str, *, kind: SaveKind) -> None:
            super().save(path, kind=kind)
            if kind == "export":
                self.first.save(path)


class TestExpectsMuch(Broken):
    breaks = "test_a_critic_starts_at_0_and_learns"

    class Kind(FakeTrainingEngine):
        def start(self, context: TrainingContext) -> None:
            super().start(context)
            if context.values:
                self.model.tensors[CRITIC][:] = 0.5


class TestForgetsItsCritic(Broken):
    breaks = "test_a_critic_is_kept_and_not_published"

    class Kind(FakeTrainingEngine):
        def load(self, path: str) -> None:
            super().load(path)
            if CRITIC in self.model.tensors:
                self.model.tensors[CRITIC][:] = 0.0


class TestForgetsItsMomentum(Broken):
    breaks = "test_training_goes_on_bit_for_bit_after_a_load"

    class Kind(FakeTrainingEngine):
        def load(self, path: str) -> None:
            super().load(path)
            self.velocity = {name: np.zeros_like(tensor) for name, tensor in self.velocity.items()}


class TestLoadsParts(Broken):
    breaks = "test_a_save_that_lacks_a_part_is_refused_whole"

    class Kind(FakeTrainingEngine):
        def load(self, path: str) -> None:
            if (Path(path) / NOTES).exists():
                super().load(path)


class TestExportsWithoutConfig(Broken):
    breaks = "test_an_export_holds_weights_and_tokenizer"

    class Kind(FakeTrainingEngine):
        def save(self, path: str, *, kind: SaveKind) -> None:
            super().save(path, kind=kind)
            (Path(path) / "config.json").unlink(missing_ok=True)


class TestKeepsTheFirstSnapshot(Broken):
    breaks = "test_a_snapshot_keeps_its_weights"

    class Kind(FakeTrainingEngine):
        def snapshot(self, name: str) -> None:
            if name not in self._snapshots:
                super().snapshot(name)


class TestMindsUnknownSnapshots(Broken):
    breaks = "test_dropping_an_unknown_snapshot_is_ignored"

    class Kind(FakeTrainingEngine):
        def drop_snapshot(self, name: str) -> None:
            del self._snapshots[name]


class TestIgnoresTheSeed(Broken):
    breaks = "test_a_model_from_scratch_depends_on_settings_and_seed"

    class Kind(FakeTrainingEngine):
        @classmethod
        def create_model(cls, path: str, *, settings: Mapping[str, Any], seed: int) -> None:
            super().create_model(path, settings=settings, seed=0)


class TestIgnoresUnknownSettings(Broken):
    breaks = "test_an_unknown_scratch_setting_is_named"

    class Kind(FakeTrainingEngine):
        @classmethod
        def create_model(cls, path: str, *, settings: Mapping[str, Any], seed: int) -> None:
            known = {name: value for name, value in settings.items() if name in SCRATCH}
            super().create_model(path, settings=known, seed=seed)


class TestRefusesEveryModel(Broken):
    breaks = "test_check_model_accepts_what_makes_a_model"

    class Kind(FakeTrainingEngine):
        @classmethod
        def check_model(cls, settings: Mapping[str, Any], *, origin: Callable[[str], str]) -> None:
            raise ConfigError("no model is good enough", origin=origin("vocabulary"))


class TestClosesOnce(Broken):
    breaks = "test_close_may_come_at_any_time_and_twice"

    class Kind(FakeTrainingEngine):
        def close(self) -> None:
            if self._model is None:
                raise EngineError("closed already")
            super().close()
