"""Trajectories of several turns: which tokens are of which turn, and what came from each turn on.

A turn is a run of sampled tokens; an environment's tokens stand between two of them. With the rewards r_k of a
trajectory's turns, the return of turn k is G_k = r_k + r_(k+1) + ...: what a turn is credited with is what came after
its beginning, never what was earned before it. Rows of one trajectory count apart.

Invariant: a trajectory of one turn has one return, its reward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.contract import Array, Batch, Ragged
from headrace.contract.columns import REWARD, TURN_REWARDS
from headrace_algorithms.gae import generalised_advantages
from headrace_algorithms.rows import Groups, sampled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """The E turns of a batch, row after row."""

    of_token: Array
    """int64 per token: its turn; of a token that the policy did not sample, the one before."""
    row: Array
    """int64 [E]."""
    number: Array
    """int64 [E]: 0 for the first turn of its row."""
    end: Array
    """int64 [E]: the last token, in the flat columns."""
    earned: Array
    """float64 [E]: r_k."""
    returns: Array
    """float64 [E]: G_k."""


def turns_of(batch: Batch, rewards: Array) -> Turns:
    """``rewards``: float [n], as they are shaped: what shaping took or gave comes with a row's last turn."""
    mask = sampled(batch)
    row_of = np.repeat(np.arange(len(batch)), mask.lengths)
    goes_on = np.zeros(len(row_of), dtype=np.bool_)
    goes_on[:-1] = mask.values[1:] & mask.values[:-1] & (row_of[1:] == row_of[:-1])
    end = np.flatnonzero(mask.values & ~goes_on)
    begin = np.flatnonzero(mask.values & ~np.roll(goes_on, 1))
    row = row_of[begin]
    count = np.bincount(row, minlength=len(batch))
    last = np.cumsum(count)
    earned = batch.ragged(TURN_REWARDS).values[end].astype(np.float64)
    earned[last[count > 0] - 1] += (rewards - batch.dense(REWARD).astype(np.float64))[count > 0]
    return Turns(
        of_token=np.searchsorted(begin, np.arange(len(mask.values)), side="right") - 1,
        row=row,
        number=np.arange(len(row)) - (last - count)[row],
        end=end,
        earned=earned,
        returns=generalised_advantages(earned, np.zeros(len(row)), count, discount=1.0, trace_decay=1.0),
    )


def turn_groups(turns: Turns, groups: Groups, rows: Array) -> Groups:
    """Turns of the same number in the same group belong together. ``rows``: int64 [n], their ids."""
    both = groups.index[turns.row] * (int(turns.number.max(initial=0)) + 1) + turns.number
    ids, index = np.unique(both, return_inverse=True)
    return Groups(index=index, count=len(ids), order=np.lexsort((rows[turns.row], index)))


def came_after(turns: Turns, mask: Ragged) -> Array:
    """float64 [N]: what turns earned, at the last trainable token of their row that is no later than their end;
    ``mask`` says which N tokens are trainable. What came before the first of them teaches nobody."""
    trainable = np.cumsum(mask.values, dtype=np.int64)
    before_row = np.append(0, trainable)[mask.offsets[:-1]][turns.row]
    place = trainable[turns.end]
    found = np.zeros(int(trainable[-1]) if len(trainable) else 0)
    some = place > before_row
    np.add.at(found, place[some] - 1, turns.earned[some])
    return found
