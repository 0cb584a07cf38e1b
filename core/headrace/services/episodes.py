"""What a worker tells and stores of the episodes that it has played."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace import clock
from headrace.contract import Array, Batch, Column, Episode, Ragged, Score
from headrace.contract.columns import (
    BEHAVIOUR_LOGPROBS,
    GREEDY,
    GROUP,
    LOSS_MASK,
    REWARD,
    TOKEN_VERSIONS,
    TOKENS,
    TRUNCATED,
    TURN_REWARDS,
    VERSION,
)
from headrace.errors import ContractError
from headrace.services.messages import Member, TrajectoryFinished, WorkItem

UNSAMPLED = -1
"""In place of a version."""


def checked_episode(episode: object, method: str) -> Episode:
    """``episode``, which an environment's ``method`` returned. ContractError when it is none."""
    if isinstance(episode, Episode):
        return episode
    raise ContractError(
        f"{method}() returned {'None' if episode is None else type(episode).__name__}, expected an Episode",
        origin="the environment",
        fix=f"return an Episode at the end of {method}()",
    )


def finished(item: WorkItem, member: Member, episode: Episode, started: float) -> TrajectoryFinished:
    """The tokens are done."""
    sampled = int(episode.loss_mask.sum())
    first = int(np.argmax(episode.loss_mask)) if sampled else len(episode.tokens)
    return TrajectoryFinished(
        group=item.group,
        trajectory=member.trajectory,
        spans=[(s.version, s.start - first, s.stop - first) for s in episode.spans],
        prompt_tokens=len(episode.tokens) - sampled,
        response_tokens=sampled,
        finish_reason=episode.finish_reason,
        started=started,
        finished=clock.now(),
    )


def rows_of(item: WorkItem, members: Sequence[Member], episodes: Sequence[Episode], scores: Sequence[Score]) -> Batch:
    """The rows of members of an item, one of each; of what not every algorithm reads, only what the item asks for."""
    masks = [_trained(episode, mask_older=item.mask_older) for episode in episodes]
    logprobs = [np.where(mask, e.logprobs, 0) for mask, e in zip(masks, episodes, strict=True)]
    oldest = [min((s.version for s in e.spans), default=item.version) for e in episodes]
    columns: dict[str, Column] = {
        TOKENS: Ragged.from_arrays([e.tokens for e in episodes], dtype=np.int32),
        LOSS_MASK: Ragged.from_arrays(masks, dtype=bool),
        BEHAVIOUR_LOGPROBS: Ragged.from_arrays(logprobs, dtype=np.float32),
        REWARD: np.array([s.reward for s in scores], dtype=np.float32),
        GROUP: np.full(len(episodes), item.group, dtype=np.int64),
        VERSION: np.array(oldest, dtype=np.int64),
        TRUNCATED: np.array([e.finish_reason == "length" for e in episodes], dtype=bool),
    }
    if TURN_REWARDS in item.columns:
        columns[TURN_REWARDS] = Ragged.from_arrays(list(map(_turn_rewards, episodes, scores)), dtype=np.float32)
    if GREEDY in item.columns:
        columns[GREEDY] = np.array([member.greedy for member in members], dtype=bool)
    if TOKEN_VERSIONS in item.columns:
        columns[TOKEN_VERSIONS] = Ragged.from_arrays([token_versions(e) for e in episodes], dtype=np.int32)
    return Batch(rows=np.array([m.trajectory for m in members], dtype=np.int64), columns=columns)


def _turn_rewards(episode: Episode, score: Score) -> Array:
    """float32 [L]."""
    rewards, ends = np.zeros(len(episode.tokens), dtype=np.float32), episode.turn_ends
    if score.turns:
        rewards[ends] = score.turns
    else:
        rewards[ends[-1:]] = score.reward
    return rewards


def token_versions(episode: Episode) -> Array:
    """int32 [L]: the version that sampled each token, :data:`UNSAMPLED` where none did."""
    versions: Array = np.full(len(episode.tokens), UNSAMPLED, dtype=np.int32)
    for span in episode.spans:
        versions[span.start : span.stop] = span.version
    versions[~episode.loss_mask] = UNSAMPLED
    return versions


def _trained(episode: Episode, *, mask_older: bool) -> Array:
    """bool [L]: sampled, and if ``mask_older`` by the newest version that sampled any."""
    if not mask_older or not episode.spans:
        return episode.loss_mask
    newest: Array = token_versions(episode) == max(span.version for span in episode.spans)
    return newest
