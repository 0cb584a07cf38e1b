"""Group-relative statistics of ``headrace_algorithms.advantages``."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.contract import Batch
from headrace.contract.columns import GROUP
from headrace.errors import ContractError
from headrace_algorithms.advantages import GroupStatistics, Scaling, group_relative
from headrace_algorithms.rows import TRAJECTORY, first_rows, groups_of


def statistics(
    rewards: list[float],
    *,
    groups: list[int] | None = None,
    trajectories: list[int] | None = None,
    scaling: Scaling = "group_std",
    dtype: type = np.float32,
) -> GroupStatistics:
    ids = np.array(groups if groups is not None else [0] * len(rewards), dtype=np.int64)
    batch = Batch(rows=np.arange(len(rewards), dtype=np.int64), columns={GROUP: ids})
    if trajectories is not None:
        batch = batch.with_columns({TRAJECTORY: np.array(trajectories, dtype=np.int64)})
    return group_relative(np.array(rewards, dtype=dtype), groups_of(batch), first=first_rows(batch), scaling=scaling)


def test_the_advantage_is_the_difference_to_the_mean_over_the_sample_deviation() -> None:
    rewards = [0.2, 0.9, 0.4, 0.4]
    expected = (np.array(rewards) - np.mean(rewards)) / np.std(rewards, ddof=1)
    np.testing.assert_allclose(statistics(rewards, dtype=np.float64).advantages, expected, rtol=1e-12)


def test_unscaled_advantages_are_the_plain_difference() -> None:
    np.testing.assert_allclose(statistics([3, 1, 2], scaling="none").advantages, [1, -1, 0])


def test_a_large_common_offset_costs_no_precision() -> None:
    offset = statistics([1e6 + 1000, 1e6, 1e6 + 500], dtype=np.float64).advantages
    np.testing.assert_allclose(offset, statistics([1000, 0, 500], dtype=np.float64).advantages, rtol=1e-9)


def test_a_deviation_below_the_floor_is_not_scaled_up() -> None:
    np.testing.assert_allclose(statistics([1.0, 1.0, 1.00003, 1.0], dtype=np.float64).advantages[2], 2.25e-5, rtol=1e-6)


def test_a_deviation_below_the_floor_is_scaled_down_when_it_is_large() -> None:
    assert np.abs(statistics([1e8, 1e8, 1e8 + 5000], dtype=np.float64).advantages).max() < 1.2


def test_the_mean_over_a_group_ignores_rows_of_the_same_trajectory() -> None:
    found = statistics([4, 4, 4, 0, 2], trajectories=[5, 5, 5, 1, 2], scaling="none")
    assert found.mean.tolist() == [2.0]
    assert found.survivors.tolist() == [3]
    assert found.advantages.tolist() == [2, 2, 2, -2, 0]


def test_a_group_without_a_scored_trajectory_has_no_statistics_and_zero_advantages() -> None:
    found = statistics([np.nan, np.nan, 1, 0], groups=[0, 0, 1, 1])
    assert found.survivors.tolist() == [0, 2]
    assert found.equal.tolist() == [True, False]
    assert found.advantages[:2].tolist() == [0, 0]


def test_an_empty_batch_has_empty_statistics() -> None:
    found = statistics([])
    assert len(found.advantages) == 0
    assert len(found.survivors) == 0


def test_leave_one_out_is_each_reward_less_the_mean_of_the_others() -> None:
    rewards = [0.2, 0.9, 0.4, 0.1]
    expected = [r - (sum(rewards) - r) / 3 for r in rewards]
    np.testing.assert_allclose(
        statistics(rewards, scaling="leave_one_out", dtype=np.float64).advantages, expected, atol=1e-12
    )


def test_an_unscored_member_is_not_among_the_others_that_are_left() -> None:
    found = statistics([1, np.nan, 0, 0], scaling="leave_one_out").advantages
    np.testing.assert_allclose(found, [1, 0, -0.5, -0.5])


def test_relative_to_the_mean_a_rare_success_counts_more() -> None:
    np.testing.assert_allclose(statistics([1, 0, 0, 0], scaling="group_mean").advantages, [3, -1, -1, -1])
    np.testing.assert_allclose(statistics([1, 1, 0, 0], scaling="group_mean").advantages, [1, 1, -1, -1])
    assert not statistics([0, 0, 0], scaling="group_mean").advantages.any()


def test_a_negative_reward_cannot_be_scaled_by_the_mean() -> None:
    with pytest.raises(ContractError, match=r"a reward of -1 cannot be scaled"):
        statistics([1, -1, 0], scaling="group_mean")


@pytest.mark.parametrize("scaling", ["group_std", "none", "leave_one_out", "group_mean"])
def test_group_ids_are_names_and_carry_no_meaning(scaling: Scaling) -> None:
    rewards = [1, 0, 0, 1, 1, 0]
    one = statistics(rewards, groups=[0, 1, 0, 1, 0, 1], scaling=scaling)
    two = statistics(rewards, groups=[900, -4, 900, -4, 900, -4], scaling=scaling)
    np.testing.assert_array_equal(one.advantages, two.advantages)
