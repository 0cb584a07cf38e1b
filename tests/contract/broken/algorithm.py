"""Algorithms that break one rule each; ``breaks`` names the rule's test."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.contract import Algorithm, AlgorithmNeeds, Batch, LossInputs, LossOutput, LossSpec, Prepared, Ragged
from headrace.contract.columns import DENOMINATOR, LOSS_MASK, LOSS_WEIGHTS, REWARD
from headrace.testing import FakeAlgorithm
from headrace.testing.losses import weighted_likelihood
from headrace.testing.suites import AlgorithmContract


class Broken(AlgorithmContract):
    """Subclasses say which algorithm."""

    Kind: type[FakeAlgorithm]

    @pytest.fixture
    def plugin(self) -> Algorithm:
        return self.Kind(FakeAlgorithm.Settings())


class Losing(FakeAlgorithm):
    """Has another loss; ``function`` is found under the class's own name, whatever this file is imported as."""

    @staticmethod
    def function(inputs: LossInputs) -> LossOutput:
        raise NotImplementedError

    def loss(self, *, temperature: float) -> LossSpec:
        name = f"{type(self).__module__}:{type(self).__qualname__}.function"
        return replace(super().loss(temperature=temperature), function=name)


def weights_of(prepared: Prepared) -> Ragged:
    column = prepared.columns[LOSS_WEIGHTS]
    assert isinstance(column, Ragged)
    return column


class TestNeedsMoreEachTime(Broken):
    breaks = "test_needs_are_answered_from_the_settings"

    class Kind(FakeAlgorithm):
        calls = itertools.count(2)

        @classmethod
        def needs(cls, settings: Any) -> AlgorithmNeeds:
            return AlgorithmNeeds(min_group_size=next(cls.calls))


class TestCountsInSingle(Broken):
    breaks = "test_prepared_columns_have_their_dtypes_and_lengths"

    class Kind(FakeAlgorithm):
        def prepare(self, batch: Batch) -> Prepared:
            prepared = super().prepare(batch)
            counts = np.asarray(prepared.columns[DENOMINATOR], dtype=np.int64)
            return replace(prepared, columns={**prepared.columns, DENOMINATOR: counts})


class TestWeighsThePrompt(Broken):
    breaks = "test_weights_are_0_outside_the_mask"

    class Kind(FakeAlgorithm):
        def prepare(self, batch: Batch) -> Prepared:
            prepared = super().prepare(batch)
            weights = weights_of(prepared)
            spread = [np.full(len(row), row[-1]) for row in weights]
            columns = {**prepared.columns, LOSS_WEIGHTS: Ragged.from_arrays(spread)}
            return replace(prepared, columns=columns)


class TestDividesByNothing(Broken):
    breaks = "test_a_row_that_is_trained_adds_to_the_denominator"

    class Kind(FakeAlgorithm):
        def prepare(self, batch: Batch) -> Prepared:
            prepared = super().prepare(batch)
            return replace(prepared, columns={**prepared.columns, DENOMINATOR: np.zeros(len(batch))})


class TestLearnsFromEquals(Broken):
    breaks = "test_a_group_of_equal_rewards_teaches_nothing"

    class Kind(FakeAlgorithm):
        def prepare(self, batch: Batch) -> Prepared:
            prepared = super().prepare(batch)
            idle = np.repeat(~prepared.trained & np.isfinite(batch.dense(REWARD)), batch.ragged(LOSS_MASK).lengths)
            weights = weights_of(prepared)
            values = np.where(idle & batch.ragged(LOSS_MASK).values, np.float32(1), weights.values)
            columns = {**prepared.columns, LOSS_WEIGHTS: weights.like(values)}
            return replace(prepared, columns=columns, trained=np.ones(len(batch), dtype=bool))


class TestTrainsTheUnscored(Broken):
    breaks = "test_a_row_without_a_reward_is_not_trained"

    class Kind(FakeAlgorithm):
        def prepare(self, batch: Batch) -> Prepared:
            rewards = np.nan_to_num(batch.dense(REWARD))
            return super().prepare(batch.with_columns({REWARD: rewards}))


class TestDividesByTheBatch(Broken):
    breaks = "test_a_group_does_not_depend_on_the_others"

    class Kind(FakeAlgorithm):
        def prepare(self, batch: Batch) -> Prepared:
            prepared = super().prepare(batch)
            columns = {**prepared.columns, DENOMINATOR: np.full(len(batch), 1.0 / len(batch))}
            return replace(prepared, columns=columns)


class TestCountsPlaces(Broken):
    breaks = "test_the_order_of_rows_does_not_matter"

    class Kind(FakeAlgorithm):
        def prepare(self, batch: Batch) -> Prepared:
            prepared = super().prepare(batch)
            columns = {**prepared.columns, DENOMINATOR: 1.0 + np.arange(len(batch)) % 4}
            return replace(prepared, columns=columns)


class TestWritesRewards(Broken):
    breaks = "test_prepare_changes_nothing_it_is_given"

    class Kind(FakeAlgorithm):
        def prepare(self, batch: Batch) -> Prepared:
            prepared = super().prepare(batch)
            batch.dense(REWARD)[:] -= 1
            return prepared


class TestReadsWhatNobodyWrites(Broken):
    breaks = "test_the_loss_reads_only_columns_that_there_are"

    class Kind(FakeAlgorithm):
        def loss(self, *, temperature: float) -> LossSpec:
            return replace(super().loss(temperature=temperature), columns=("proximal_logprobs",))


class TestForgetsTheTemperature(Broken):
    breaks = "test_the_loss_is_at_the_sampling_temperature"

    class Kind(FakeAlgorithm):
        def loss(self, *, temperature: float) -> LossSpec:
            return super().loss(temperature=1.0)


class TestAverages(Broken):
    breaks = "test_the_loss_is_a_sum"

    class Kind(Losing):
        @staticmethod
        def function(inputs: LossInputs) -> LossOutput:
            output = weighted_likelihood(inputs)
            return replace(output, numerator=output.numerator * (1 / inputs.sequences))


class TestCountsTheWeightless(Broken):
    breaks = "test_tokens_of_weight_0_add_nothing"

    class Kind(Losing):
        @staticmethod
        def function(inputs: LossInputs) -> LossOutput:
            output = weighted_likelihood(inputs)
            return replace(output, numerator=output.numerator + inputs.logprobs.sum())


class TestNamesNoReduction(Broken):
    breaks = "test_metrics_name_their_reduction"

    class Kind(Losing):
        @staticmethod
        def function(inputs: LossInputs) -> LossOutput:
            return replace(weighted_likelihood(inputs), metrics={"odd": (1, 1, "median")})  # type: ignore[dict-item]  # on purpose
