"""Cases B, of estimators that scale over a whole batch: through ``whitening`` and the plugins that use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace.contract import Array, Batch, Prepared, Ragged
from headrace.contract.columns import ADVANTAGES, GROUP, LOSS_MASK, REWARD
from headrace_algorithms.grpo import Grpo
from headrace_algorithms.variants import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from headrace_algorithms.whitening import whitened

NAN = float("nan")


def rows_of(rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int], *, pad: int = 0) -> Batch:
    """One prompt token, ``lengths`` trainable ones, ``pad`` others."""
    masks = [np.array([False] + [True] * length + [False] * pad) for length in lengths]
    return Batch(
        rows=np.arange(len(rewards)),
        columns={
            LOSS_MASK: Ragged.from_arrays(masks, dtype=np.bool_),
            REWARD: np.array(rewards, dtype=np.float32),
            GROUP: np.array(groups),
        },
    )


def advantages(prepared: Prepared) -> Ragged:
    column = prepared.columns[ADVANTAGES]
    assert isinstance(column, Ragged)
    return column


def per_row(algorithm: Grpo, batch: Batch) -> Array:
    """The advantage of each row's first trainable token."""
    return np.array([row[1] for row in advantages(algorithm.prepare(batch))])


def test_B04_masked_slots_are_selected_away_before_any_arithmetic() -> None:
    values = np.array([[2, 4, NAN], [9, np.inf, NAN]])
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    found = whitened(values.ravel(), mask.ravel(), whitening="shift_and_scale").reshape(2, 3)
    np.testing.assert_allclose(found[mask == 1], [-0.8321, -0.2774, 1.1094], atol=5e-5)
    assert not found[mask == 0].any()


@pytest.mark.parametrize("shares", [[[0, 1, 2, 3]], [[0, 2], [1, 3]], [[3], [], [0, 1, 2], []]])
def test_B05_the_scale_is_that_of_the_batch_whatever_share_of_it_a_rank_trains(shares: list[list[int]]) -> None:
    """Tokens 1 1 3 3 3 5: mean 8/3, deviation sqrt(34/15)."""
    batch = rows_of([1, 3, 5, NAN], [0, 1, 2, 3], [2, 3, 1, 4])
    ready = batch.with_columns(ReinforcePlusPlus(ReinforcePlusPlus.Settings()).prepare(batch).columns)
    found = np.concatenate([ready.take(share).ragged(ADVANTAGES).values for share in shares])
    unit = np.sqrt(((8 / 3 - 1) ** 2 * 2 + (8 / 3 - 3) ** 2 * 3 + (8 / 3 - 5) ** 2) / 5)
    expected = [(reward - 8 / 3) / unit for reward in (1, 1, 3, 3, 3, 5)]
    np.testing.assert_allclose(np.sort(found[found != 0]), expected, rtol=1e-6)


@pytest.mark.parametrize("pad", [0, 100])
def test_B06_mean_and_deviation_are_of_trainable_tokens_alone(pad: int) -> None:
    """Advantages [1, 1] and [3]: mean 5/3, deviation (ddof 1) 2 / sqrt(3)."""
    found = per_row(ReinforcePlusPlus(ReinforcePlusPlus.Settings()), rows_of([1, 3], [0, 1], [2, 1], pad=pad))
    np.testing.assert_allclose(found, [-2 / 3 * np.sqrt(3) / 2, 4 / 3 * np.sqrt(3) / 2], rtol=1e-6)


@pytest.mark.parametrize(("valid", "expected"), [(0, [0, 0]), (1, [5, 0]), (2, [-0.707107, 0.707107])])
def test_B07_fewer_than_two_tokens_are_left_as_they_are_and_counted(valid: int, expected: list[float]) -> None:
    counts = (np.arange(2) < valid).astype(np.int64)
    found = whitened(np.array([5.0, 7.0]), counts, whitening="shift_and_scale")
    np.testing.assert_allclose(found, expected, atol=1e-6)
    prepared = ReinforcePlusPlus(ReinforcePlusPlus.Settings()).prepare(rows_of([5, 7], [0, 1], counts.tolist()))
    assert prepared.metrics["advantages/not_whitened"].value == (valid < 2)


@pytest.mark.parametrize(("whitening", "expected"), [("scale", [1, 2, 3]), ("shift_and_scale", [-1, 0, 1])])
def test_B08_what_is_not_shifted_keeps_its_relative_magnitudes(whitening: Any, expected: list[float]) -> None:
    found = whitened(np.array([2.0, 4.0, 6.0]), np.ones(3, dtype=np.int64), whitening=whitening)
    np.testing.assert_allclose(found, expected)


def test_B01_a_shift_of_the_batch_does_not_make_equal_rewards_teach() -> None:
    """Group 0 has unequal lengths, so that the mean of its advantages over tokens is not 0."""
    batch = rows_of([1, 0, 1, 1], [0, 0, 1, 1], [3, 1, 2, 2])
    prepared = ReinforcePlusPlusBaseline(ReinforcePlusPlusBaseline.Settings()).prepare(batch)
    assert prepared.trained.tolist() == [True, True, False, False]
    found = [row[1] for row in advantages(prepared)]
    mean = (3 * 0.5 - 0.5) / 8
    unit = np.sqrt((3 * (0.5 - mean) ** 2 + (-0.5 - mean) ** 2 + 4 * mean**2) / 7)
    np.testing.assert_allclose(found, [(0.5 - mean) / unit, (-0.5 - mean) / unit, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("scaling", ["group_std", "group_mean"])
def test_B15_a_second_scaling_stage_is_refused(scaling: Any) -> None:
    with pytest.raises(ValueError, match="would scale twice"):
        Grpo.Settings(whitening="scale", advantage_scaling=scaling)
