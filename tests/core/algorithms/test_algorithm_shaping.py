"""The penalty of over-long answers."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.contract import Batch, Ragged
from headrace.contract.columns import ADVANTAGES, GROUP, LOSS_MASK, REWARD, TOKEN_VERSIONS
from headrace_algorithms.grpo import Grpo
from headrace_algorithms.reporting import response_metrics
from headrace_algorithms.rows import TRAJECTORY
from headrace_algorithms.settings import GrpoSettings
from headrace_algorithms.shaping import generated_tokens, overlong_penalty


def rows_with(masks: list[list[int]], rewards: list[float], **columns: list[int]) -> Batch:
    dense = {name: np.array(values) for name, values in columns.items()}
    return Batch(
        rows=np.arange(len(masks)),
        columns={
            LOSS_MASK: Ragged.from_arrays([np.array(mask, dtype=np.bool_) for mask in masks]),
            REWARD: np.array(rewards, dtype=np.float32),
            GROUP: np.zeros(len(masks), dtype=np.int64),
            **dense,
        },
    )


def test_B16_length_counts_generated_tokens_only() -> None:
    assert generated_tokens(rows_with([[0, 1, 1, 0, 0, 1, 1, 1]], [0.0])).tolist() == [5]


def test_tokens_that_another_version_sampled_count_though_they_are_not_trained() -> None:
    batch = rows_with([[0, 0, 0, 0, 1, 1]], [0.0])
    versions = Ragged.from_arrays([np.array([-1, 3, 3, -1, 4, 4], dtype=np.int32)])
    mixed = batch.with_columns({TOKEN_VERSIONS: versions})
    assert generated_tokens(mixed).tolist() == [4]
    assert response_metrics(mixed)["response/length"].value == 4
    assert response_metrics(batch)["response/length"].value == 2


def test_B16_the_penalty_grows_over_the_buffer_and_ends_at_one() -> None:
    found = overlong_penalty(np.array([15, 16, 18, 20, 25]), length=20, buffer=4)
    assert found.tolist() == [0, 0, -0.5, -1, -1]


def test_without_a_buffer_only_answers_beyond_the_length_are_punished() -> None:
    assert overlong_penalty(np.array([19, 20, 21]), length=20, buffer=0).tolist() == [0, 0, -1]


def test_rows_of_one_trajectory_count_together() -> None:
    batch = rows_with([[0, 1], [0, 1, 1], [0, 1]], [1.0, 1.0, 0.0], **{TRAJECTORY: [4, 4, 9]})
    assert generated_tokens(batch).tolist() == [3, 3, 1]


def test_the_penalty_shapes_advantages_and_both_rewards_are_reported() -> None:
    batch = rows_with([[0, 1, 1, 1, 1], [0, 1, 1]], [1.0, 1.0])
    plain = Grpo(GrpoSettings()).prepare(batch)
    shaped = Grpo(GrpoSettings(overlong_length=4, overlong_buffer=2)).prepare(batch)
    assert not np.any(plain.columns[ADVANTAGES].values)
    assert shaped.columns[ADVANTAGES].values[1] < 0 < shaped.columns[ADVANTAGES].values[6]
    assert shaped.metrics["reward/mean"].value == 1.0
    assert shaped.metrics["reward/shaped_mean"].value == 0.5
    assert shaped.metrics["reward/shaped_share"].value == 0.5
    assert (plain.metrics["groups/equal_share"].value, shaped.metrics["groups/equal_share"].value) == (1.0, 0.0)


@pytest.mark.parametrize("settings", [{"overlong_buffer": 4}, {"overlong_length": 4, "overlong_buffer": 4}])
def test_a_buffer_that_cannot_act_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="overlong_buffer"):
        GrpoSettings(**settings)  # type: ignore[arg-type]
