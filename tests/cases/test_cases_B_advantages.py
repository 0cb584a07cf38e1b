"""Cases B: advantages, baselines, reward normalisation, through the real ``grpo`` plugin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.contract import Array, Batch, Prepared, Ragged
from headrace.contract.columns import (
    ADVANTAGES,
    BEHAVIOUR_LOGPROBS,
    DENOMINATOR,
    GROUP,
    LOSS_MASK,
    LOSS_WEIGHTS,
    REWARD,
    TOKENS,
    TRUNCATED,
)
from headrace_algorithms.grpo import Grpo
from headrace_algorithms.rows import TRAJECTORY
from headrace_algorithms.settings import GrpoSettings

NAN = float("nan")


def rows_of(
    rewards: Sequence[float],
    *,
    groups: Sequence[int] | None = None,
    masks: Sequence[Sequence[int]] | None = None,
    truncated: Sequence[bool] | None = None,
) -> Batch:
    """Rows with the given rewards; by default one group, and one prompt token and two trainable ones per row."""
    count = len(rewards)
    arrays = [np.array(m, dtype=np.bool_) for m in (masks or [[0, 1, 1]] * count)]
    return Batch(
        rows=np.arange(count, dtype=np.int64),
        columns={
            TOKENS: Ragged.from_arrays([np.full(len(m), i) for i, m in enumerate(arrays)], dtype=np.int32),
            LOSS_MASK: Ragged.from_arrays(arrays, dtype=np.bool_),
            BEHAVIOUR_LOGPROBS: Ragged.from_arrays([np.where(m, -1.0, NAN) for m in arrays], dtype=np.float32),
            REWARD: np.array(rewards, dtype=np.float32),
            GROUP: np.array(groups if groups is not None else [0] * count, dtype=np.int64),
            TRUNCATED: np.array(truncated if truncated is not None else [False] * count, dtype=np.bool_),
        },
    )


def prepare(batch: Batch, **settings: Any) -> Prepared:
    return Grpo(GrpoSettings(**settings)).prepare(batch)


def advantages(batch: Batch, **settings: Any) -> Array:
    """One advantage per row: that of all its trainable tokens, after checking that they agree; 0 without any."""
    column = prepare(batch, **settings).columns[ADVANTAGES]
    assert isinstance(column, Ragged)
    assert np.isfinite(column.values).all()
    result = np.zeros(len(batch))
    for i, mask in enumerate(batch.ragged(LOSS_MASK)):
        assert not column[i][~mask].any()
        chosen = np.unique(column[i][mask])
        assert len(chosen) <= 1
        result[i] = chosen[0] if len(chosen) else 0.0
    return result


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, 1e6 + 0.1, -3.3, 0.0])
@pytest.mark.parametrize("scaling", ["group_std", "none"])
def test_B01_equal_rewards_give_exactly_zero(reward: float, scaling: str) -> None:
    batch = rows_of([reward] * 7)
    prepared = prepare(batch, advantage_scaling=scaling)
    assert not advantages(batch, advantage_scaling=scaling).any()
    assert not prepared.trained.any()
    assert prepared.metrics["groups/equal_share"].value == 1.0


def test_B01_rewards_equal_up_to_rounding_are_equal() -> None:
    rewards = [0.1 + 0.2, 0.3, 0.30000001, 0.3]
    assert not advantages(rows_of(rewards)).any()


def test_B01_the_flag_of_a_group_comes_from_that_group() -> None:
    prepared = prepare(rows_of([1, 1, 0, 1], groups=[0, 0, 1, 1]))
    assert prepared.trained.tolist() == [False, False, True, True]
    assert prepared.metrics["groups/equal_share"].value == 0.5


def test_B01_whether_the_kl_still_applies_to_equal_groups_is_a_switch() -> None:
    batch = rows_of([1, 1, 0, 1], groups=[0, 0, 1, 1])
    on = prepare(batch, kl_coefficient=0.1)
    off = prepare(batch, kl_coefficient=0.1, regularise_equal_groups=False)
    assert on.trained.tolist() == [True, True, True, True]
    assert off.trained.tolist() == [False, False, True, True]
    weights = off.columns[LOSS_WEIGHTS]
    assert isinstance(weights, Ragged)
    assert [bool(w.any()) for w in weights] == [False, False, True, True]
    np.testing.assert_array_equal(np.asarray(off.columns[DENOMINATOR]), [2, 2, 2, 2])


@pytest.mark.parametrize(
    "rewards",
    [
        [1.0] * 7 + [1.0 + 1e-5],
        [1e4] * 7 + [1e4 + 0.001],
        [1e6] * 15 + [1e6 + 0.0625],
        [0.0] * 7 + [1e-7],
        [-2.5] * 3 + [-2.50001],
    ],
)
def test_B02_one_odd_reward_among_near_equal_ones_stays_small(rewards: list[float]) -> None:
    difference = max(rewards) - min(rewards)
    assert np.abs(advantages(rows_of(rewards))).max() <= 1.001 * difference + 1e-9


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=16))
def test_B02_no_advantage_exceeds_what_the_group_size_allows(rewards: list[float]) -> None:
    size = len(rewards)
    result = advantages(rows_of(rewards))
    assert np.abs(result).max() <= (size - 1) / np.sqrt(size) + 1e-6
    assert abs(result.sum()) <= 1e-6 * size


def test_B03_statistics_are_over_scored_members_and_unscored_rows_are_masked() -> None:
    batch = rows_of([1, NAN, 0, 1])
    np.testing.assert_allclose(advantages(batch), [0.57735, 0, -1.154701, 0.57735], atol=1e-6)
    prepared = prepare(batch, kl_coefficient=0.1)
    weights = prepared.columns[LOSS_WEIGHTS]
    assert isinstance(weights, Ragged)
    assert prepared.trained.tolist() == [True, False, True, True]
    assert not weights[1].any()
    np.testing.assert_array_equal(np.asarray(prepared.columns[DENOMINATOR]), [2, 0, 2, 2])
    assert prepared.metrics["reward/unscored_share"].value == 0.25
    assert prepared.metrics["reward/mean"].value == pytest.approx(2 / 3)


@pytest.mark.parametrize("rewards", [[NAN, NAN, NAN, 1], [NAN] * 4, [NAN, NAN, 0.5, float("inf")]])
def test_B03_fewer_than_two_survivors_get_zero_and_are_counted(rewards: list[float]) -> None:
    batch = rows_of(rewards)
    assert not advantages(batch).any()
    metrics = prepare(batch).metrics
    assert metrics["groups/undecided_share"].value == 1.0
    assert all(np.isfinite(m.value) for m in metrics.values())


def test_B04_a_value_outside_the_mask_is_never_read() -> None:
    masks = [[0, 1, 1, 0, 0], [0, 1, 0, 0]]
    batch = rows_of([1, 0], masks=masks)
    assert np.isnan(batch.ragged(BEHAVIOUR_LOGPROBS).values).sum() == 6
    prepared = prepare(batch)
    for column in prepared.columns.values():
        assert np.isfinite(column.values if isinstance(column, Ragged) else column).all()
    np.testing.assert_allclose(advantages(batch), [0.707107, -0.707107], atol=1e-6)


@pytest.mark.parametrize("pad", [0, 100])
def test_B06_untrained_columns_change_nothing(pad: int) -> None:
    plain, wide = rows_of([1, 0, 0]), rows_of([1, 0, 0], masks=[[0, 1, 1] + [0] * pad] * 3)
    np.testing.assert_array_equal(advantages(plain), advantages(wide))
    np.testing.assert_array_equal(prepare(plain).columns[DENOMINATOR], prepare(wide).columns[DENOMINATOR])


def test_B06_a_baseline_over_the_group_asks_for_two_members_at_start() -> None:
    assert Grpo.needs(GrpoSettings()).min_group_size == 2
    assert not advantages(rows_of([1.0])).any()


@pytest.mark.parametrize(("scaling", "right", "wrong"), [("group_std", 1.207615, -0.724569), ("none", 0.625, -0.375)])
def test_B09_closed_form_and_independence_of_other_groups(scaling: str, right: float, wrong: float) -> None:
    rewards = [1, 1, 1, 0, 0, 0, 0, 0]
    alone = advantages(rows_of(rewards), advantage_scaling=scaling)
    np.testing.assert_allclose(alone, [right] * 3 + [wrong] * 5, atol=1e-6)
    assert alone.sum() == pytest.approx(0, abs=1e-6)
    beside = advantages(rows_of([*rewards, 7, -9], groups=[4] * 8 + [2] * 2), advantage_scaling=scaling)
    np.testing.assert_array_equal(beside[:8], alone)


@given(st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, NAN]), min_size=4, max_size=12), st.randoms())
def test_B09_no_order_of_rows_changes_an_answer_bit_for_bit(rewards: list[float], random: Any) -> None:
    groups = [i % 3 for i in range(len(rewards))]
    batch = rows_of(rewards, groups=groups)
    order = list(range(len(rewards)))
    random.shuffle(order)
    np.testing.assert_array_equal(advantages(batch.take(order)), advantages(batch)[order])


def test_B10_a_failed_member_changes_no_statistic() -> None:
    scored, with_failure = [1.0, 0.0, 0.0], [1.0, 0.0, 0.0, NAN]
    np.testing.assert_array_equal(advantages(rows_of(with_failure))[:3], advantages(rows_of(scored)))
    assert prepare(rows_of(with_failure)).metrics["reward/mean"].value == pytest.approx(1 / 3)


def test_B11_a_row_left_out_of_the_loss_still_shapes_the_baseline() -> None:
    batch = rows_of([1, 0, 0, 0], truncated=[True, False, False, False])
    settings = {"mask_truncated": True, "advantage_scaling": "none"}
    prepared = prepare(batch, **settings)
    column = prepared.columns[ADVANTAGES]
    assert isinstance(column, Ragged)
    assert [float(a[1]) for a in column] == [0.0, -0.25, -0.25, -0.25]
    np.testing.assert_array_equal(np.asarray(prepared.columns[DENOMINATOR]), [0, 2, 2, 2])


def test_B12_a_trajectory_of_several_rows_counts_once_in_the_baseline() -> None:
    masks = [[0, 1, 1], [0, 1], [0, 0, 1, 1, 1], [0, 1]]
    batch = rows_of([1, 1, 1, 0], masks=masks).with_columns({TRAJECTORY: np.array([8, 8, 8, 3])})
    result = advantages(batch, advantage_scaling="none")
    np.testing.assert_array_equal(result, [0.5, 0.5, 0.5, -0.5])
    assert prepare(batch).metrics["reward/mean"].value == 0.5


def test_B13_tokens_before_a_tool_reply_keep_the_advantage() -> None:
    batch = rows_of([2, 0], masks=[[0, 1, 0, 0, 1], [0, 1, 0, 0, 1]])
    column = prepare(batch, advantage_scaling="none").columns[ADVANTAGES]
    assert isinstance(column, Ragged)
    assert column[0].tolist() == [0, 1, 0, 0, 1]


def test_B14_reordering_moves_every_column_together() -> None:
    count = 12
    batch = rows_of([float(i) for i in range(count)], groups=[i // 4 for i in range(count)])
    ready = batch.with_columns({ADVANTAGES: batch.ragged(TOKENS).like(batch.ragged(TOKENS).values.astype(np.float32))})
    generator = np.random.default_rng(3)
    resampled = ready.take(generator.permutation(count)).take(generator.integers(0, count, 20))
    shards = [resampled.take(np.arange(rank, 20, 3)) for rank in range(3)]
    for shard in (*shards, Batch.concatenate(shards)):
        np.testing.assert_array_equal(shard.ragged(ADVANTAGES).values, shard.ragged(TOKENS).values)
        np.testing.assert_array_equal(np.repeat(shard.rows, shard.ragged(TOKENS).lengths), shard.ragged(TOKENS).values)


def test_B14_a_prepared_batch_can_be_shuffled_before_or_after() -> None:
    batch = rows_of([1, 0, 0, 3, 0, 2], groups=[0, 0, 0, 1, 1, 1])
    order = np.array([4, 1, 5, 0, 3, 2])
    after = batch.with_columns(prepare(batch).columns).take(order)
    before = batch.take(order)
    before = before.with_columns(prepare(before).columns)
    np.testing.assert_array_equal(after.ragged(ADVANTAGES).values, before.ragged(ADVANTAGES).values)
    np.testing.assert_array_equal(after.dense(DENOMINATOR), before.dense(DENOMINATOR))


def test_B15_one_scaling_stage_reaches_the_loss() -> None:
    result = advantages(rows_of([0, 1, 0, 10], groups=[0, 0, 1, 1]))
    np.testing.assert_allclose(result, [-0.707107, 0.707107, -0.707107, 0.707107], atol=1e-6)


def test_B16_length_counts_generated_tokens_only() -> None:
    metrics = prepare(rows_of([1, 0], masks=[[0, 1, 1, 0, 0, 1, 1, 1]] * 2)).metrics
    assert metrics["response/length"].value == 5.0
