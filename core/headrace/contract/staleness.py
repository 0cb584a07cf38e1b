"""The ``staleness`` role: when groups may start, batches be taken and versions be published.

A policy is pure: it sees counts, never rows, clocks or engines. ``flow`` asks it at every event, in the real
run, in the property tests and in the simulator alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.contract.plugin import Plugin


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowView:
    """Where a run stands. Counts are in groups; a group's version is that of its oldest token."""

    batch_groups: int
    """Groups in a training batch (TBS)."""
    version: int
    """The newest published policy version, which is also the one the trainer works on."""
    batch_taken: bool
    """Whether the training batch of ``version`` has been taken."""
    in_flight: Mapping[int, int]
    """Groups with an unfinished member, by version."""
    ready: Mapping[int, int]
    """Whole groups waiting to be trained, by version."""
    last_part: int = 0
    """Of that batch, once it is taken: the groups that no earlier part of it had, which are all of them where it is not
    trained in parts. The fewer they are, the sooner the next version follows."""

    @property
    def outstanding(self) -> int:
        """Groups dispatched and not taken for training."""
        return sum(self.in_flight.values()) + sum(self.ready.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """What becomes of a trajectory in the middle of its answer when its instance takes up a newer version: it goes on
    under that. Its tokens are then of several versions, each with the log-prob of the one that sampled it."""

    keep_kv: bool = False
    """Keys and values of the tokens so far stay as older versions computed them, which takes an engine that is
    :class:`~headrace.contract.inference.KVMigration`. Else they are computed again, by the newer version."""
    mask_older: bool = False
    """Of a row only tokens of its newest version are trained."""


class StalenessPolicy(Plugin, ABC):
    """``max_staleness`` (K) bounds trainer's version − row's version for every trained row."""

    max_staleness: int

    @property
    def interruption(self) -> Interruption | None:
        """None: every trajectory is of the one version it started under (C1 of DORA, arXiv 2604.26256). Else that is
        given up, and the policy is not ``lockstep``."""
        return None

    @property
    def lockstep(self) -> bool:
        """True: assignment, admission to slots, decode batches and micro-batches follow ids, so that a run is
        reproducible to the bit."""
        return self.max_staleness == 0

    @abstractmethod
    def check(self, *, batch_groups: int) -> None:
        """StalenessError, with the inequality, for settings that must deadlock or overshoot."""

    @abstractmethod
    def admit(self, view: FlowView) -> int:
        """How many more groups may start now, under ``view.version``."""

    def may_fill(self, view: FlowView, version: int) -> bool:
        """Whether another group may start under ``version``, older than the newest and in flight, to fill slots that
        idle because their instance serves no newer one. Asked where :meth:`admit` allows a group for which the newest
        version has no room."""
        return False

    @abstractmethod
    def may_take(self, view: FlowView, chosen: Mapping[int, int]) -> bool:
        """Whether a batch of ``chosen`` groups (count by version) may be taken for ``view.version``."""

    @abstractmethod
    def may_publish(self, view: FlowView) -> bool:
        """Whether ``view.version + 1`` may be published, the batch of ``view.version`` being trained. A yes stands,
        whatever is lost before it is published."""
