"""What policy-gradient algorithms can be told: the mean that the loss is, which rows count, and the loss; and what
``grpo`` and its variants can be told of advantages.

Invariant: a setting that could not act in the chosen combination is refused here, before anything starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headrace_algorithms.advantages import Baseline, Scaling
from headrace_algorithms.aggregation import Aggregation
from headrace_algorithms.loss_settings import LossSettings
from headrace_algorithms.whitening import Whitening


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings(LossSettings):
    """What does not depend on where advantages come from."""

    whitening: Whitening = "none"
    """Whether advantages are scaled, or shifted and scaled, over all trainable tokens of the batch, which must then be
    there at once. See ``headrace_algorithms.whitening``."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """What a token is pushed by: the reward of its trajectory, or what its turn and those after it earned."""
    aggregation: Aggregation = "token_mean"
    """The mean the loss is; see ``headrace_algorithms.aggregation``."""
    constant_length: float | None = None
    """Divisor per row, in tokens, of aggregation ``constant``."""
    mask_truncated: bool = False
    """Leave rows that ran out of budget out of numerator and denominator. Their rewards stay in the baseline."""
    overlong_length: int | None = None
    """Generated tokens from which on an answer loses a whole point of reward; None: length costs nothing."""
    overlong_buffer: int = 0
    """Tokens before ``overlong_length`` over which the loss of reward grows from 0 to 1."""
    report_entropy: bool = True
    """Report ``policy/entropy``; costs the trainer one more pass over the logits."""

    def __post_init__(self) -> None:
        LossSettings.__post_init__(self)
        _aggregation(self)
        _overlong(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoSettings(PolicySettings):
    """Settings of ``grpo``. Under ``whitening`` groups of equal rewards keep their advantage of 0."""

    baseline: Baseline = "group_mean"
    """What a reward is compared with: the mean of its group, nothing that the group knows, or the reward of one more
    answer to the prompt, decoded greedily, which is not trained on."""
    advantage_scaling: Scaling = "group_std"
    """What the distance to the group's mean is divided by. See ``headrace_algorithms.advantages``."""
    regularise_equal_groups: bool = True
    """Whether the KL and the entropy bonus also apply to groups whose rewards are equal."""

    def __post_init__(self) -> None:
        PolicySettings.__post_init__(self)
        _one_scale(self)
        _greedy(self)


def _one_scale(settings: GrpoSettings) -> None:
    scaling = settings.advantage_scaling
    if settings.baseline != "group_mean" and scaling != "none":
        raise ValueError(
            f"advantage_scaling {scaling!r} is of distances to the group's mean, and baseline = {settings.baseline!r} "
            "takes none; set advantage_scaling = 'none', or baseline = 'group_mean'"
        )
    if settings.whitening != "none" and scaling in ("group_std", "group_mean"):
        raise ValueError(
            f"whitening {settings.whitening!r} after advantage_scaling {scaling!r} would scale twice; "
            "set advantage_scaling = 'none', or whitening = 'none'"
        )


def _greedy(settings: GrpoSettings) -> None:
    """Of the greedy answer its reward alone is known: not its length, nor what its turns earned."""
    if settings.baseline != "greedy":
        return
    if settings.overlong_length is not None:
        raise ValueError(
            f"overlong_length = {settings.overlong_length} would shape rewards and not that of the greedy answer they "
            "are compared with; remove it, or set baseline = 'group_mean'"
        )
    if settings.credit == "turn":
        raise ValueError(
            "credit = 'turn' compares turns, and of the greedy answer only the reward of the whole is known; set "
            "credit = 'trajectory', or baseline = 'group_mean'"
        )


def _aggregation(settings: PolicySettings) -> None:
    length = settings.constant_length
    if settings.aggregation == "constant" and (length is None or not 0 < length < math.inf):
        raise ValueError(
            f"aggregation 'constant' needs a positive constant_length, got {length}; "
            "the rollout's max_new_tokens is a usual choice"
        )
    if settings.aggregation != "constant" and length is not None:
        raise ValueError(
            f"constant_length = {length} does nothing under aggregation {settings.aggregation!r}; "
            "remove it, or set aggregation = 'constant'"
        )


def _overlong(settings: PolicySettings) -> None:
    length, buffer = settings.overlong_length, settings.overlong_buffer
    if length is None and buffer:
        raise ValueError(f"overlong_buffer = {buffer} does nothing without overlong_length; set it, or remove this")
    if length is not None and not 0 <= buffer < length:
        raise ValueError(
            f"overlong_buffer = {buffer} and overlong_length = {length} are out of bounds; "
            "expected 0 <= overlong_buffer < overlong_length"
        )
