"""What rank 0 tells the other ranks, and what they answer.

Every rank does every order, rank 0 too; only the rows of a batch differ. Nothing here is a pickle: orders are typed and
checked as all messages are.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec

from headrace.contract.columns import Array, Batch
from headrace.contract.loss import LossSpec
from headrace.contract.metrics import Metric
from headrace.contract.training import ForwardOutput


class RankSettings(Protocol):
    """What the settings of an engine of several ranks say of them."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Rank by rank, which share of a batch's rows it gets: 0 and up. Ranks of one share compute it together."""

    @property
    def rank_deadline(self) -> float:
        """Seconds that one rank waits for another before the engine ends."""

    @property
    def dtype(self) -> str:
        """Of the weights that are published."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Sent once, to a process that has just started."""

    shard: str
    """``module:Class`` of the engine's :class:`Shard`."""
    settings: Any
    """The engine's; at other ranks, as they travel, until :meth:`Shard.Settings` has read them."""
    name: str
    model_path: str
    seed: int
    threads: int
    total_steps: int
    values: bool
    rank: int
    rendezvous: str
    """File over which the ranks find one another."""
    import_path: list[str]
    """Where rank 0 looks for modules, so that a loss is found everywhere."""


class Begin(msgspec.Struct, tag="begin", frozen=True):
    """Begin a step. ``file``: of the loss's module, for one that no import finds."""

    loss: LossSpec
    file: str


class Accumulate(msgspec.Struct, tag="accumulate", frozen=True):
    """Add the gradient of a rank's rows."""

    batch: Batch


class Finish(msgspec.Struct, tag="finish", frozen=True):
    """Take the step."""

    denominator: float


class Discard(msgspec.Struct, tag="discard", frozen=True):
    """Forget the step."""


class Score(msgspec.Struct, tag="score", frozen=True):
    """Outputs of a rank's rows, without gradient."""

    batch: Batch
    outputs: tuple[ForwardOutput, ...]
    weights: str
    temperature: float


class Gather(msgspec.Struct, tag="gather", frozen=True):
    """Bring one whole tensor to rank 0."""

    name: str


class Freeze(msgspec.Struct, tag="freeze", frozen=True):
    """Keep a snapshot."""

    name: str


class Drop(msgspec.Struct, tag="drop", frozen=True):
    """Free a snapshot."""

    name: str


class Save(msgspec.Struct, tag="save", frozen=True):
    """Write this rank's part into a directory; ``snapshots``: in the order in which they are numbered there."""

    path: str
    snapshots: tuple[str, ...]


class Load(msgspec.Struct, tag="load", frozen=True):
    """Read what :class:`Save` wrote, on any number of ranks. ``steps``: taken by then; ``snapshots``: as saved."""

    path: str
    steps: int
    snapshots: tuple[str, ...]


Order = Begin | Accumulate | Finish | Discard | Score | Gather | Freeze | Drop | Save | Load


class Stepped(msgspec.Struct, frozen=True):
    """What a step did, the same on all ranks but for ``metrics``, which are of a rank's own rows."""

    applied: bool
    loss: float
    gradient_norm: float
    learning_rate: float
    metrics: dict[str, Metric]


class Done(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """An order was done."""

    outputs: dict[str, Array] = {}
    """Of :class:`Score`, the values of the rank's trainable tokens; of :class:`Gather`, the tensor, at rank 0."""
    stepped: Stepped | None = None


DONE = Done()


def shard_class(name: str) -> type[Any]:
    """The :class:`Shard` of a :class:`Setup`, constructed with that."""
    module, _, kind = name.partition(":")
    found: type[Any] = getattr(importlib.import_module(module), kind)
    return found


class Shard(Protocol):
    """What a rank has between ``start`` and ``close``: its part of the model, and the orders it does in step with the
    others. It is constructed with a :class:`Setup`, meets the other ranks and loads the model. Every method but
    ``describe`` is collective."""

    Settings: ClassVar[type[Any]]

    def do(self, order: Order) -> Done:
        """:class:`~headrace_torch.ranks.group.RefusedOrderError` when all ranks leave it; anything else that is raised
        has put the ranks out of step."""

    @property
    def steps(self) -> int:
        """Optimiser steps applied."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the model's tensors by their Hugging Face names, in the order in which they are published."""

    @property
    def identity(self) -> dict[str, object]:
        """What a saved state must have in common with this engine to be loaded by it."""

    def describe(self, directory: Path) -> None:
        """Write all of an exported Hugging Face directory but the weights; rank 0 alone does."""

    def close(self) -> None:
        """Leave the group."""
