"""What a worker tells and stores of an episode whose tokens are of several versions."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headrace.contract import Completion, Episode, Score, VersionSpan
from headrace.contract.columns import BEHAVIOUR_LOGPROBS, GREEDY, LOSS_MASK, TOKEN_VERSIONS, VERSION
from headrace.errors import ContractError
from headrace.services.episodes import checked_episode, finished, rows_of
from headrace.services.messages import Member, WorkItem

MEMBER = Member(trajectory=8, task=0, instance="", seed=0)
LOGPROBS = np.array([-0.1, -0.2, -0.3, -0.4, -0.5], dtype=np.float32)


def item(*, mask_older: bool = False) -> WorkItem:
    return WorkItem(
        kind="rollout",
        group=4,
        version=6,
        columns=("token_versions",),
        split="train",
        members=[MEMBER],
        max_new_tokens=8,
        temperature=1.0,
        mask_older=mask_older,
    )


def episode(*spans: tuple[int, int, int]) -> Episode:
    """Five tokens after a prompt of two."""
    told = tuple(VersionSpan(version=version, start=start, stop=stop) for version, start, stop in spans)
    answer = Completion(token_ids=np.arange(5, dtype=np.int32), logprobs=LOGPROBS, spans=told, finish_reason="stop")
    return Episode.single_turn(np.array([1, 2], dtype=np.int32), answer)


MIXED = episode((6, 0, 2), (7, 2, 3), (9, 3, 5))


def test_a_row_is_as_old_as_its_oldest_token_and_every_token_has_its_version() -> None:
    rows = rows_of(item(), [MEMBER], [MIXED], [Score(reward=1.0)])
    assert rows.dense(VERSION).tolist() == [6]
    assert rows.ragged(TOKEN_VERSIONS)[0].tolist() == [-1, -1, 6, 6, 7, 9, 9]
    assert rows.ragged(LOSS_MASK)[0].tolist() == [False] * 2 + [True] * 5
    assert rows.ragged(BEHAVIOUR_LOGPROBS)[0].tolist() == [0, 0, *LOGPROBS.tolist()]


def test_older_tokens_can_be_left_out_of_the_loss_and_the_row_is_no_younger_for_it() -> None:
    rows = rows_of(item(mask_older=True), [MEMBER], [MIXED], [Score(reward=1.0)])
    assert rows.ragged(LOSS_MASK)[0].tolist() == [False] * 5 + [True] * 2
    assert rows.ragged(BEHAVIOUR_LOGPROBS)[0].tolist() == [0] * 5 + LOGPROBS[3:].tolist()
    assert rows.ragged(TOKEN_VERSIONS)[0].tolist() == [-1, -1, 6, 6, 7, 9, 9]
    assert rows.dense(VERSION).tolist() == [6]


def test_a_row_says_whether_it_is_a_greedy_answer_where_it_is_asked() -> None:
    greedy, episodes = msgspec.structs.replace(MEMBER, trajectory=9, greedy=True), [episode((6, 0, 5))] * 2
    scores = [Score(reward=1.0)] * 2
    asked = msgspec.structs.replace(item(), columns=("greedy",))
    assert rows_of(asked, [MEMBER, greedy], episodes, scores).dense(GREEDY).tolist() == [False, True]
    assert GREEDY not in rows_of(item(), [MEMBER, greedy], episodes, scores).columns


@pytest.mark.parametrize("mask_older", [True, False])
def test_what_is_of_one_version_is_trained_whole(mask_older: bool) -> None:
    rows = rows_of(item(mask_older=mask_older), [MEMBER], [episode((6, 0, 5))], [Score(reward=1.0)])
    assert rows.ragged(LOSS_MASK)[0].tolist() == [False] * 2 + [True] * 5


def test_what_an_environment_inserted_has_no_version() -> None:
    """Two turns, and a token between them that nobody sampled."""
    answered = episode((6, 0, 5))
    mask = answered.loss_mask.copy()
    mask[4] = False
    told = (VersionSpan(version=6, start=2, stop=4), VersionSpan(version=7, start=5, stop=7))
    turns = Episode(
        tokens=answered.tokens, loss_mask=mask, logprobs=answered.logprobs * mask, spans=told, finish_reason="stop"
    )
    rows = rows_of(item(mask_older=True), [MEMBER], [turns], [Score(reward=1.0)])
    assert rows.ragged(TOKEN_VERSIONS)[0].tolist() == [-1, -1, 6, 6, -1, 7, 7]
    assert rows.ragged(LOSS_MASK)[0].tolist() == [False] * 5 + [True] * 2


def test_the_controller_hears_of_every_span_in_response_coordinates() -> None:
    told = finished(item(), MEMBER, MIXED, 0.0)
    assert told.spans == [(6, 0, 2), (7, 2, 3), (9, 3, 5)]
    assert (told.prompt_tokens, told.response_tokens) == (2, 5)


@pytest.mark.parametrize(("returned", "said"), [(None, "None"), ("text", "str")])
def test_what_is_no_episode_is_refused_in_the_words_of_who_wrote_the_environment(returned: object, said: str) -> None:
    with pytest.raises(ContractError, match=rf"^run\(\) returned {said}, expected an Episode") as refused:
        checked_episode(returned, "run")
    assert "return an Episode" in refused.value.fix
    assert checked_episode(MIXED, "run") is MIXED
