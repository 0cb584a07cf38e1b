"""One rank: its part of the model, and the orders it does in step with the others.

Every method but ``describe`` is collective: all ranks call it, or none. Invariant: between two orders all ranks are at
the same step, with parts of the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import singledispatchmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.contract.columns import TOKENS, Array, Batch
from headrace.contract.training import CURRENT, ForwardOutput
from headrace.errors import EngineError
from headrace_megatron.architecture import Architecture, require_layout
from headrace_megatron.checkpoint import FORMAT, read, read_random, write, write_random
from headrace_megatron.layout import Layout, depart, enter
from headrace_megatron.micro_batches import MicroBatch, idle_micro_batch, micro_batches
from headrace_megatron.network import Network, Weights, build, in_dtype, transformer_config
from headrace_megatron.optimizer import MegatronUpdater, with_gradients
from headrace_megatron.scoring import run
from headrace_megatron.settings import MegatronTrainingSettings
from headrace_megatron.step import MegatronStep, no_critic
from headrace_torch.arrays import as_numpy
from headrace_torch.checkpoint import copy_side_files
from headrace_torch.ranks.group import agreed
from headrace_torch.ranks.orders import (
    DONE,
    Accumulate,
    Begin,
    Discard,
    Done,
    Drop,
    Finish,
    Freeze,
    Gather,
    Load,
    Order,
    Save,
    Score,
    Setup,
)
from headrace_torch.trainer.resume import random_state, set_random_state
from headrace_torch.trainer.schedule import Schedule

PIECES = 4
"""Micro-batches for each of p stages, of which one then waits for (p - 1) / (5 p - 1) of the time: 11 % of two."""


class MegatronShard:
    """See :class:`~headrace_torch.ranks.orders.Shard`."""

    Settings: ClassVar[type[Any]] = MegatronTrainingSettings

    def __init__(self, setup: Setup) -> None:
        """Meets the other ranks and loads the model. EngineError when a GPU or the model is not there, or the model
        cannot be shared so."""
        settings: MegatronTrainingSettings = setup.settings
        if settings.device == "cuda" and torch.cuda.device_count() < settings.ranks:
            raise EngineError(
                f"{settings.ranks} ranks need as many GPUs, and torch sees {torch.cuda.device_count()}",
                origin=setup.name,
                fix='let tensor_parallel x pipeline_parallel x data_parallel be the number of GPUs, or device = "cpu"',
            )
        torch.set_num_threads(setup.threads)
        torch.manual_seed(setup.seed + setup.rank)
        self._settings, self._model_path = settings, setup.model_path
        self._architecture = Architecture.from_directory(setup.model_path)
        require_layout(self._architecture, settings, origin=setup.name)
        self._layout = Layout(rank=setup.rank, settings=settings)
        self._snapshots: dict[str, Network] = {}
        self._step: MegatronStep | None = None
        enter(setup.rendezvous, self._layout)
        try:
            self._config = transformer_config(self._architecture, self._layout)
            self._network = build(self._architecture, self._layout, self._config)
            self._weights = Weights(self._network, self._architecture, self._layout)
            agreed(lambda: self._weights.read(setup.model_path))
            self._model = with_gradients(in_dtype(self._network, self._config), self._config)
            self._updater = self._new_updater(setup)
        except BaseException:  # whatever it was, the next engine must be able to join; raised again
            depart()
            raise

    def _new_updater(self, setup: Setup) -> MegatronUpdater:
        settings = self._settings
        schedule = Schedule(
            name=settings.schedule,
            warmup_steps=settings.warmup_steps,
            total_steps=setup.total_steps,
            final_share=settings.final_learning_rate_share,
        )
        return MegatronUpdater(self._model, settings, schedule)

    @property
    def steps(self) -> int:
        """Optimiser steps applied."""
        return self._updater.steps

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the model's tensors by their Hugging Face names, in their order."""
        return self._weights.shapes

    @property
    def identity(self) -> dict[str, object]:
        """See :class:`~headrace_torch.ranks.orders.Shard`."""
        settings = self._settings
        return {
            "format": FORMAT,
            "model": self._architecture.to_json(),
            "dtype": settings.dtype,
            "expert_parallel": settings.expert_parallel,  # Megatron keeps moments of shared experts elsewhere
        }

    def describe(self, directory: Path) -> None:
        """See :class:`~headrace_torch.ranks.orders.Shard`."""
        values = json.loads((Path(self._model_path) / "config.json").read_text(encoding="utf-8"))
        values.pop("torch_dtype", None)
        values["dtype"] = self._settings.dtype
        (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        copy_side_files(Path(self._model_path), directory)

    @singledispatchmethod
    def do(self, order: Order) -> Done:
        """See :class:`~headrace_torch.ranks.orders.Shard`."""
        raise TypeError(f"no order: {order!r}")

    # ------------------------------------------------------------ steps

    @do.register
    def _begin(self, order: Begin) -> Done:
        self._step = agreed(lambda: MegatronStep(self._updater, self._model, self._layout, order))
        return DONE

    @do.register
    def _accumulate(self, order: Accumulate) -> Done:
        assert self._step is not None
        self._step.accumulate(order.batch, self._planned, self._levelled)
        return DONE

    @do.register
    def _finish(self, order: Finish) -> Done:
        assert self._step is not None
        stepped = self._step.finish(order.denominator)
        self._step = None
        return Done(stepped=stepped)

    @do.register
    def _discard(self, order: Discard) -> Done:
        self._step = None
        self._updater.clear()
        return DONE

    def _planned(self, batch: Batch) -> list[MicroBatch]:
        stages = self._settings.pipeline_parallel
        pieces = PIECES * stages if stages > 1 else 1
        found = micro_batches(batch, vocabulary=self._architecture.config.vocab_size, pieces=pieces)
        return [each.to(self._settings.device) for each in found]

    def _levelled(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Where ranks exchange tokens in every layer, all compute as many micro-batches."""
        if self._settings.expert_parallel == 1:
            return batches
        most = torch.tensor(len(batches))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return [*batches, *[idle_micro_batch().to(self._settings.device)] * (int(most) - len(batches))]

    # ------------------------------------------------------------ scores and weights

    @do.register
    @torch.no_grad()
    def _score(self, order: Score) -> Done:
        model = self._model if order.weights == CURRENT else in_dtype(self._snapshots[order.weights], self._config)

        def planned() -> list[MicroBatch]:
            if "values" in order.outputs:
                raise no_critic()
            return self._planned(order.batch)

        tokens = order.batch.ragged(TOKENS)
        values: dict[ForwardOutput, Array] = {}
        for name in order.outputs:
            values[name] = np.zeros(len(tokens.values), dtype=np.float32)
        places = tokens.like(np.arange(len(tokens.values)))

        def kept(batch: MicroBatch, scores: Any) -> Tensor:
            if id(batch) in own:
                for name, value in values.items():
                    value[places.take(batch.rows).values[batch.plan.trainable]] = scores[name].cpu().numpy()
            return torch.zeros((), device=batch.tokens.device)

        batches = agreed(planned)
        own = {id(batch) for batch in batches}
        work = self._levelled(batches)
        if work:
            run(model, work, kept, temperature=order.temperature, outputs=order.outputs, gradient=False)
        return Done(outputs={name: value for name, value in values.items()}) if self._layout.speaks else DONE

    @do.register
    def _gather(self, order: Gather) -> Done:
        whole = self._weights.whole(order.name)
        return DONE if whole is None else Done(outputs={order.name: as_numpy(whole)})

    @do.register
    def _freeze(self, order: Freeze) -> Done:
        frozen = self._snapshots.get(order.name) or self._blank()
        with torch.no_grad():
            for target, source in zip(frozen.parameters(), self._network.parameters(), strict=True):
                target.copy_(source)
        self._snapshots[order.name] = frozen
        return DONE

    @do.register
    def _drop(self, order: Drop) -> Done:
        self._snapshots.pop(order.name, None)
        return DONE

    def _blank(self) -> Network:
        network = build(self._architecture, self._layout, self._config)
        network.requires_grad_(False)
        return network

    # ------------------------------------------------------------ saves

    @do.register
    def _save(self, order: Save) -> Done:
        snapshots = {f"snapshot-{number}": self._snapshots[name] for number, name in enumerate(order.snapshots)}
        write(order.path, self._network, self._updater, snapshots)
        agreed(lambda: write_random(order.path, self._layout.rank, random_state()))
        return DONE

    @do.register
    def _load(self, order: Load) -> Done:
        snapshots = {f"snapshot-{number}": self._blank() for number in range(len(order.snapshots))}
        random = agreed(lambda: read_random(order.path, self._layout.rank))
        read(order.path, self._network, self._updater, snapshots)
        self._snapshots = dict(zip(order.snapshots, snapshots.values(), strict=True))
        self._updater.steps = order.steps
        if random:
            set_random_state(random)
        return DONE

    def close(self) -> None:
        """Leave the groups."""
        depart()
