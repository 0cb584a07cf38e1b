"""Case E09: the reward sees the whole trajectory, and what each turn earned reaches the estimator."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.contract import AlgorithmNeeds, Episode, Score, VersionSpan
from headrace.contract.columns import REWARD, TURN_REWARDS
from headrace.errors import ContractError
from headrace.flow.stages import stages_of, stored_first
from headrace.services.episodes import rows_of
from headrace.services.messages import Member, WorkItem
from headrace.services.scorer import checked_score
from headrace_algorithms.turns import turns_of

MASK = np.array([0, 1, 1, 0, 1, 0, 0, 1, 1], dtype=np.bool_)
"""Three turns."""
EPISODE = Episode(
    tokens=np.arange(9, dtype=np.int32),
    loss_mask=MASK,
    logprobs=np.where(MASK, -1.0, 0.0).astype(np.float32),
    spans=(VersionSpan(version=1, start=1, stop=9),),
    finish_reason="stop",
)
MEMBER = Member(trajectory=8, task=0, instance="", seed=0)
ITEM = WorkItem(
    kind="rollout",
    group=4,
    version=1,
    split="train",
    columns=("turn_rewards",),
    members=[MEMBER],
    max_new_tokens=8,
    temperature=1.0,
)


def test_E09_the_rewards_of_three_turns_reach_the_estimator_and_add_up() -> None:
    score = checked_score(Score(reward=1.0, turns=(0.2, 0.3, 0.5)), EPISODE)
    rows = rows_of(ITEM, [MEMBER], [EPISODE], [score])
    assert rows.dense(REWARD).tolist() == [1.0]
    np.testing.assert_allclose(rows.ragged(TURN_REWARDS)[0], [0, 0, 0.2, 0, 0.3, 0, 0, 0, 0.5], rtol=1e-6)
    turns = turns_of(rows, rows.dense(REWARD).astype(np.float64))
    np.testing.assert_allclose(turns.earned, [0.2, 0.3, 0.5], rtol=1e-6)
    np.testing.assert_allclose(turns.returns, [1.0, 0.8, 0.5], rtol=1e-6)


def test_E09_a_reward_without_turns_comes_at_the_end() -> None:
    rows = rows_of(ITEM, [MEMBER], [EPISODE], [checked_score(Score(reward=1.0), EPISODE)])
    assert rows.ragged(TURN_REWARDS)[0].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (Score(reward=1.0, turns=(0.5, 0.5)), r"gave rewards of 2 turns; the episode has 3"),
        (Score(reward=1.0, turns=(0.5, 0.5, 0.5)), r"gave reward 1, and turns that add up to 1\.5"),
    ],
)
def test_E09_turns_that_are_not_those_of_the_episode_are_refused(score: Score, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        checked_score(score, EPISODE)


def test_E09_an_unscored_trajectory_has_no_turns() -> None:
    assert checked_score(Score(reward=float("nan"), turns=(1.0,)), EPISODE).turns == ()


def test_E09_turn_rewards_are_stored_only_where_an_algorithm_needs_them() -> None:
    assert TURN_REWARDS in stored_first(stages_of(AlgorithmNeeds(turn_rewards=True)))
    assert TURN_REWARDS not in stored_first(stages_of(AlgorithmNeeds()))
