"""What the engine is between ``start`` and ``close``: deals rows out to ranks, and puts together what comes of them.

Invariant: every row of a batch is in one share; rows are dealt so that shares have as equal numbers of tokens as can
be.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from headrace.balance import balanced_shares
from headrace.contract.columns import LOSS_MASK, LOSS_WEIGHTS, TOKENS, Array, Batch, Ragged
from headrace.contract.loss import LossSpec
from headrace.contract.metrics import merge_metrics
from headrace.contract.training import CURRENT, ForwardOutput, SaveKind, StepResult, TrainingContext, TrainingStep
from headrace.contract.weights import WeightSource
from headrace.errors import ContractError
from headrace_torch.checkpoint import WEIGHTS
from headrace_torch.ranks.crew import Crew
from headrace_torch.ranks.export import write_weights
from headrace_torch.ranks.orders import (
    Accumulate,
    Begin,
    Discard,
    Drop,
    Finish,
    Freeze,
    Gather,
    Load,
    RankSettings,
    Save,
    Score,
)
from headrace_torch.ranks.others import Others
from headrace_torch.ranks.saves import require_files, sizes
from headrace_torch.trainer.core import FORWARD_TOKENS
from headrace_torch.trainer.losses import Loss
from headrace_torch.trainer.packing import split_rows
from headrace_torch.trainer.resume import MANIFEST, new_directory, read_manifest
from headrace_torch.trainer.scoring import require_temperature


class Leader:
    """Rank 0's view of the engine. Methods are the contract's."""

    def __init__(self, settings: RankSettings, context: TrainingContext, others: Others) -> None:
        """EngineError when the model or a device is not there."""
        self._settings = settings
        self._snapshots: list[str] = []
        self._stepping = False
        self._crew = Crew(others)

    def forward(
        self, batch: Batch, *, outputs: tuple[ForwardOutput, ...], weights: str, temperature: float
    ) -> dict[str, Ragged]:
        """See the contract. ValueError for an unknown snapshot."""
        require_temperature(temperature)
        if weights != CURRENT and weights not in self._snapshots:
            raise ValueError(f"no snapshot {weights!r}; there are {sorted(self._snapshots)}")
        tokens = batch.ragged(TOKENS)
        needed = Batch(rows=batch.rows, columns={TOKENS: tokens, LOSS_MASK: batch.ragged(LOSS_MASK)})
        values = {name: np.zeros(len(tokens.values), dtype=np.float32) for name in outputs}
        for rows in split_rows(needed, tokens=FORWARD_TOKENS * (max(self._crew.shares) + 1)):
            shares = [rows[share] for share in deal(needed.take(rows), self._crew.shares)]
            orders = [Score(needed.take(share), outputs, weights, temperature) for share in shares]
            for share, done in zip(shares, self._crew.do(*orders), strict=True):
                places = tokens.like(np.arange(len(tokens.values))).take(share).values
                for name, value in values.items():
                    if name in done.outputs:
                        value[places] = done.outputs[name]
        return {name: tokens.like(value) for name, value in values.items()}

    def begin_step(self, loss: LossSpec) -> TrainingStep:
        """See the contract. ValueError while another step is open."""
        if self._stepping:
            raise ValueError("a training step is open; finish or discard it before beginning another")
        step = DealtStep(self._crew, loss, ended=self._end_step)
        self._stepping = True
        return step

    def _end_step(self) -> None:
        self._stepping = False

    def weight_source(self) -> WeightSource:
        """In the dtype of the settings, tensor by tensor."""
        return GatheredWeights(self._crew)

    def snapshot(self, name: str) -> None:
        """Freeze the current weights. ValueError for the name of the current ones."""
        if name == CURRENT:
            raise ValueError(f"{CURRENT!r} names the weights being trained")
        self._crew.do(Freeze(name))
        if name not in self._snapshots:
            self._snapshots.append(name)

    def drop_snapshot(self, name: str) -> None:
        """Free a snapshot; an unknown one is ignored."""
        if name in self._snapshots:
            self._crew.do(Drop(name))
            self._snapshots.remove(name)

    def save(self, path: str, *, kind: SaveKind) -> None:
        """See the contract."""
        if self._stepping:
            raise ValueError("a training step is open; finish or discard it before saving")
        if kind == "resume":
            with new_directory(path, marker=MANIFEST) as directory:
                self._save(directory)
            return
        with new_directory(path, marker="config.json") as directory:
            self._crew.shard.describe(directory)
            write_weights(
                directory / WEIGHTS,
                self.weight_source().tensors(),
                self._crew.shard.shapes,
                dtype=self._settings.dtype,
            )

    def _save(self, directory: Path) -> None:
        self._crew.do(Save(str(directory), tuple(self._snapshots)))
        manifest = {
            **self._crew.shard.identity,
            "ranks": len(self._crew.shares),
            "steps": self._crew.shard.steps,
            "snapshots": self._snapshots,
            "files": sizes(directory),
        }
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")

    def load(self, path: str) -> None:
        """See the contract. A state saved by any number of ranks will do."""
        if self._stepping:
            raise ValueError("a training step is open; finish or discard it before loading")
        manifest = read_manifest(path, self._crew.shard.identity)
        require_files(path, manifest["files"])
        snapshots = tuple(manifest["snapshots"])
        self._crew.do(Load(path, int(manifest["steps"]), snapshots))
        self._snapshots = list(snapshots)

    def close(self) -> None:
        """End the other ranks."""
        self._crew.close()


class DealtStep(TrainingStep):
    """A step whose micro-batches are dealt out; ``ended`` is called once, when it is over."""

    def __init__(self, crew: Crew, spec: LossSpec, *, ended: Callable[[], None]) -> None:
        require_temperature(spec.temperature)
        Loss(spec)  # refused here when it cannot be imported
        module = sys.modules[spec.function.partition(":")[0]]
        try:
            crew.do(Begin(spec, getattr(module, "__file__", None) or ""))
        except TypeError as error:
            raise ContractError(
                f"the settings of loss {spec.function} cannot be sent to other ranks: {error}",
                fix="use numbers, text, lists and dictionaries of them",
            ) from error
        self._crew, self._ended = crew, ended
        self._columns = {TOKENS, LOSS_MASK, LOSS_WEIGHTS, *spec.columns}
        self._open = True

    def accumulate(self, batch: Batch) -> None:
        """See :class:`TrainingStep`."""
        self._require_open()
        columns = {name: column for name, column in batch.columns.items() if name in self._columns}
        needed = Batch(rows=batch.rows, columns=columns)
        shares = deal(needed, self._crew.shares)
        self._crew.do(*(Accumulate(needed.take(share)) for share in shares))

    def finish(self, *, denominator: float) -> StepResult:
        """See :class:`TrainingStep`. ValueError when the denominator is negative or not finite."""
        self._require_open()
        if not 0.0 <= denominator < math.inf:
            raise ValueError(f"the denominator of a step must be finite and at least 0, got {denominator}")
        stepped = [done.stepped for done in self._crew.do(Finish(denominator)) if done.stepped is not None]
        self._close()
        first = stepped[0]
        return StepResult(
            applied=first.applied,
            loss=first.loss,
            gradient_norm=first.gradient_norm,
            learning_rate=first.learning_rate,
            metrics=merge_metrics(rank.metrics for rank in stepped),
        )

    def discard(self) -> None:
        """See :class:`TrainingStep`; a step that is over is left alone."""
        if self._open:
            self._close()
            self._crew.do(Discard())

    def _require_open(self) -> None:
        if not self._open:
            raise ValueError("this training step is over; begin another")

    def _close(self) -> None:
        self._open = False
        self._ended()


class GatheredWeights(WeightSource):
    """The current weights. At any time one tensor is whole."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """See :class:`WeightSource`."""
        for name in self._crew.shard.shapes:
            yield name, self._crew.do(Gather(name))[0].outputs[name]


def deal(batch: Batch, shares: Sequence[int]) -> list[Array]:
    """Each rank's rows, int64, ascending. ``shares``: which share each rank gets."""
    count = max(shares) + 1
    if count == 1:
        return [np.arange(len(batch))] * len(shares)
    found = balanced_shares(batch.ragged(TOKENS).lengths.tolist(), count)
    return [found[share] for share in shares]
