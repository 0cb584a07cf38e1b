"""Credit by turns: what came from a turn on, compared with the same turn of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace.contract import Array, Batch, Ragged
from headrace.contract.columns import (
    ADVANTAGES,
    GROUP,
    LOSS_MASK,
    LOSS_WEIGHTS,
    REWARD,
    TOKEN_VERSIONS,
    TURN_REWARDS,
    VALUES,
)
from headrace_algorithms.grpo import Grpo
from headrace_algorithms.ppo import Ppo
from headrace_algorithms.turns import turns_of

NAN = float("nan")
TWO, THREE = [0, 1, 1, 0, 1], [0, 1, 0, 1, 0, 0, 1, 1]
"""Masks of two turns (of two tokens and one) and of three."""


def rows_of(turns: Sequence[Sequence[float]], masks: Sequence[Sequence[int]], groups: Sequence[int] = ()) -> Batch:
    """``turns``: what each turn of each row earned."""
    arrays = [np.array(mask, dtype=np.bool_) for mask in masks]
    rewards = [np.zeros(len(mask), dtype=np.float32) for mask in arrays]
    for row, mask, earned in zip(rewards, arrays, turns, strict=True):
        row[np.flatnonzero(mask & ~np.append(mask[1:], False))] = earned
    return Batch(
        rows=np.arange(len(turns)),
        columns={
            LOSS_MASK: Ragged.from_arrays(arrays, dtype=np.bool_),
            TURN_REWARDS: Ragged.from_arrays(rewards, dtype=np.float32),
            VALUES: Ragged.from_arrays([np.where(mask, 0.0, NAN) for mask in arrays], dtype=np.float32),
            REWARD: np.array([sum(earned) for earned in turns], dtype=np.float32),
            GROUP: np.array(groups or [0] * len(turns)),
        },
    )


def advantages(batch: Batch, **settings: Any) -> Ragged:
    column = Grpo(Grpo.Settings(credit="turn", advantage_scaling="none", **settings)).prepare(batch).columns[ADVANTAGES]
    assert isinstance(column, Ragged)
    return column


def rewards_of(batch: Batch) -> Array:
    return batch.dense(REWARD).astype(np.float64)


def test_a_turn_is_credited_with_what_came_from_it_on() -> None:
    batch = rows_of([[1, 0.5], [0.25, 0.5, 1]], [TWO, THREE])
    turns = turns_of(batch, rewards_of(batch))
    assert turns.row.tolist() == [0, 0, 1, 1, 1]
    assert turns.number.tolist() == [0, 1, 0, 1, 2]
    assert turns.returns.tolist() == [1.5, 0.5, 1.75, 1.5, 1]
    assert turns.end.tolist() == [2, 4, 6, 8, 12]


def test_a_turn_is_compared_with_the_same_turn_of_the_others() -> None:
    """Returns 1.5, 0.5 and 1, 1: means 1.25 and 0.75."""
    found = advantages(rows_of([[1, 0.5], [0, 1]], [TWO, TWO]))
    assert found[0].tolist() == [0, 0.25, 0.25, 0, -0.25]
    assert found[1].tolist() == [0, -0.25, -0.25, 0, 0.25]


def test_a_turn_that_no_other_trajectory_reached_teaches_nothing() -> None:
    found = advantages(rows_of([[1, 0], [0, 0, 1]], [TWO, THREE]))
    assert found[1].tolist() == [0, 0, 0, 0.5, 0, 0, 0, 0]


def test_of_one_turn_it_is_the_trajectory_s_advantage_to_the_bit() -> None:
    masks = [[0, 1, 1], [0, 1], [0, 1, 1, 1], [0, 1]]
    batch = rows_of([[0.1], [0.7], [0.3], [NAN]], masks, [0, 0, 0, 0])
    for settings in ({}, {"advantage_scaling": "none", "whitening": "shift_and_scale"}):
        by_turn, whole = (
            Grpo(Grpo.Settings(credit=credit, **settings)).prepare(batch) for credit in ("turn", "trajectory")
        )
        for name in (ADVANTAGES, LOSS_WEIGHTS):
            one, other = by_turn.columns[name], whole.columns[name]
            assert isinstance(one, Ragged)
            assert isinstance(other, Ragged)
            np.testing.assert_array_equal(one.values, other.values)
        assert by_turn.trained.tolist() == whole.trained.tolist()


def test_what_length_costs_comes_with_the_last_turn() -> None:
    batch = rows_of([[1, 0.5], [0, 1]], [TWO, THREE[:4]])
    assert turns_of(batch, rewards_of(batch) - [1, 0]).returns.tolist() == [0.5, -0.5, 1, 1]


def test_a_group_s_turns_depend_neither_on_the_others_nor_on_the_order_of_rows() -> None:
    turns = [[0.1, 0.2], [0.3, 0.4, 0.1], [0.7, 0.7], [1.0, 0.2, 0.3]]
    batch = rows_of(turns, [TWO, THREE, TWO, THREE], [4, 4, 9, 9])
    together, order = advantages(batch), [2, 1, 3, 0]
    for place, row in enumerate(order):
        np.testing.assert_array_equal(advantages(batch.take(order))[place], together[row])
    np.testing.assert_array_equal(advantages(batch.take([0, 1])).values, together.take([0, 1]).values)


def test_a_turn_that_an_older_version_sampled_is_a_turn_though_it_is_not_trained() -> None:
    batch = rows_of([[1, 0.5], [0, 1]], [TWO, TWO])
    mask, versions = batch.ragged(LOSS_MASK), np.where(batch.ragged(LOSS_MASK).values, 3, -1)
    trained = mask.values.copy()
    trained[[1, 2]] = False
    older = batch.with_columns({LOSS_MASK: mask.like(trained), TOKEN_VERSIONS: mask.like(versions.astype(np.int32))})
    found = advantages(older)
    assert found[0].tolist() == [0, 0, 0, 0, -0.25]
    assert found[1].tolist() == [0, -0.25, -0.25, 0, 0.25]


def test_an_empty_batch_has_no_turns() -> None:
    assert len(advantages(rows_of([], [])).values) == 0


def test_a_critic_s_credit_has_rewards_where_turns_end() -> None:
    """Without values, discount 0.5: 1 * 0.5 + 0.5 * 0.25, 1 + 0.5 * 0.5, 0.5."""
    ppo = Ppo(Ppo.Settings(credit="turn", whitening="none", discount=0.5))
    column = ppo.prepare(rows_of([[1, 0.5]], [TWO])).columns[ADVANTAGES]
    assert isinstance(column, Ragged)
    assert column[0].tolist() == [0, 0.625, 1.25, 0, 0.5]


def test_what_a_turn_that_is_not_trained_earned_is_credited_to_the_last_trained_token_before_it() -> None:
    batch = rows_of([[1, 0.5], [2, 4]], [TWO, TWO])
    mask, versions = batch.ragged(LOSS_MASK), np.where(batch.ragged(LOSS_MASK).values, 3, -1)
    trained = mask.values.copy()
    trained[[4, 6, 7]] = False
    older = batch.with_columns({LOSS_MASK: mask.like(trained), TOKEN_VERSIONS: mask.like(versions.astype(np.int32))})
    column = Ppo(Ppo.Settings(credit="turn", whitening="none")).prepare(older).columns[ADVANTAGES]
    assert isinstance(column, Ragged)
    assert column[0].tolist() == [0, 1.5, 1.5, 0, 0]
    assert column[1].tolist() == [0, 0, 0, 0, 4]


@pytest.mark.parametrize("algorithm", [Grpo, Ppo])
def test_only_credit_by_turns_needs_their_rewards(algorithm: Any) -> None:
    assert algorithm.needs(algorithm.Settings(credit="turn")).turn_rewards
    assert not algorithm.needs(algorithm.Settings()).turn_rewards


def test_a_turn_ends_with_its_row() -> None:
    batch = rows_of([[1], [2]], [[0, 1], [1, 1]])
    turns = turns_of(batch, rewards_of(batch))
    assert turns.row.tolist() == [0, 1]
    assert turns.end.tolist() == [1, 3]
