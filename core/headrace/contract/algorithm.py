"""The ``algorithm`` role: numbers in, numbers out. It never touches the trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.contract.columns import Batch, Column
from headrace.contract.loss import LossSpec
from headrace.contract.metrics import Metric
from headrace.contract.plugin import Plugin


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmNeeds:
    """What an algorithm with given settings needs; read before anything starts."""

    rollout: bool = True
    """False: rows are the environment's demonstrations, no engine generates."""
    min_group_size: int = 1
    whole_batch: bool = False
    """It compares the groups of a training batch with one another (a mean or a scale over all of them), so that it must
    see the batch whole: such a batch cannot stream, and no process of its own can prepare groups as they come."""
    turn_rewards: bool = False
    """What each turn earned, beside the reward of the whole trajectory."""
    greedy_reward: bool = False
    """The reward of one more answer to each prompt, decoded greedily under the version of its group. It is generated
    and scored beside the others; the algorithm sees its reward alone, and it is never trained on."""
    behaviour_logprobs: bool = True
    proximal_logprobs: bool = False
    """Computed by the trainer at the start of each training batch."""
    reference_logprobs: bool = False
    """Of the weights that the phase starts from; computed by the trainer, or apart."""
    values: bool = False
    """Of a critic that the trainer keeps beside the policy, computed before ``prepare``, at the start of each training
    batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """What an algorithm adds to a training batch."""

    columns: Mapping[str, Column]
    """Always ``loss_weights`` and ``denominator``; ``advantages`` where the loss reads them."""
    trained: Any
    """bool [n]: False for rows that cannot contribute a gradient and need no forward pass. Their
    ``denominator`` still counts; that of a row which is trained with any weight is above 0."""
    metrics: Mapping[str, Metric]


class Algorithm(Plugin, ABC):
    """Pure functions of whole groups, or of whole batches."""

    @classmethod
    @abstractmethod
    def needs(cls, settings: Any) -> AlgorithmNeeds:
        """Answered from the settings alone."""

    @abstractmethod
    def prepare(self, batch: Batch) -> Prepared:
        """Advantages and loss weights of a training batch: whole groups, in any order; columns ``tokens``,
        ``loss_mask``, ``behaviour_logprobs``, ``values``, ``turn_rewards`` and ``greedy_reward`` where needed,
        ``reward``, ``group``, ``version``, ``truncated``, and ``token_versions`` where the staleness policy interrupts
        trajectories. The answer for a group does not depend on the other groups, unless the algorithm needs the
        ``whole_batch``: that is given at once. The order of rows never matters."""

    @abstractmethod
    def loss(self, *, temperature: float) -> LossSpec:
        """The loss for the prepared columns."""
