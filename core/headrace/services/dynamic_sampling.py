"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): groups whose rewards are all equal teach nothing and are
dropped when their last member is scored; others start in their place, so that a batch is always full.

Invariant: a batch has as many groups as ever, every one with different rewards; or the run stops and says how many of
those that were generated for it had them.
"""

from __future__ import annotations

import math

from headrace.errors import RunError

UNINFORMATIVE = "uninformative"
"""Why such a group is dropped."""
TOLERANCE = 1e-6
"""Rewards that differ by less, or by this share of them, are equal, as the built-in algorithms see it."""


class DynamicSampling:
    """Of one phase. ``limit``: groups that may be generated for one batch."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._rewards: dict[int, list[float]] = {}
        """Of groups that have a member without."""
        self.informative = self.generated = 0
        """Groups since the last batch."""

    def scored(self, group: int, reward: float) -> None:
        """The reward of another member."""
        self._rewards.setdefault(group, []).append(reward)

    def rejects(self, group: int) -> bool:
        """Whether a group, all of whose members are scored, has equal rewards. RunError when a batch has taken too many
        groups."""
        rewards = self._rewards.pop(group)
        different = not math.isclose(min(rewards), max(rewards), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        self.generated += 1
        self.informative += different
        if not different and self.generated >= self._limit:
            raise RunError(
                f"accepted {self.informative} of {self.generated} groups that were generated for one batch: each of "
                "the others has equal rewards, which batch.dynamic_sampling does not train on",
                origin="[batch] max_generated_batches",
                fix="look at the rewards in the report: tasks may be too hard or too easy for this model, or the "
                "reward constant; otherwise raise max_generated_batches or group_size",
            )
        return not different

    def taken(self) -> None:
        """A batch is complete."""
        self.informative = self.generated = 0

    def forget(self, group: int) -> None:
        """It is not outstanding any more."""
        self._rewards.pop(group, None)
