"""What the controller and the nodes of separate stages say to each other; rows go past it, through the data plane."""

from __future__ import annotations

from headrace.contract import Metric
from headrace.registry import PluginSpec
from headrace.services.messages import Message


class StageSetup(Message, frozen=True):
    """What a node of a stage needs before its first phase."""

    ledger: str
    """Where the ledger of the data plane is."""
    threads: int
    seed: int
    quantization: PluginSpec | None = None
    """The scheme that the trainer computes in; None: it does not."""


class StagePhase(Message, frozen=True):
    """Do the stage's part of a phase from now on: read ``reads`` and write ``writes`` of rows of ``partition``."""

    partition: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    engine: PluginSpec
    """Of the trainer, in this phase."""
    algorithm: PluginSpec
    model_path: str
    """What the phase starts from: the reference policy."""
    temperature: float
    lockstep: bool
    """As in :class:`headrace.services.messages.PhaseSetup`."""
    tokens: int
    """That are worked on at a time, as in the trainer's micro-batches; what is longer by itself comes alone."""


class Prepared(Message, frozen=True):
    """What an algorithm had to say about groups, when it prepared them."""

    metrics: dict[int, dict[str, Metric]]
    """By group."""
