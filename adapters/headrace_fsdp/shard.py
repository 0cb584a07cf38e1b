"""One rank: its part of the model, and the orders it does in step with the others.

Every method is collective: all ranks call it, or none. Invariant: between two orders all ranks are at the same step,
with parts of the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatchmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from headrace.contract.columns import LOSS_MASK, LOSS_WEIGHTS, TOKENS, Array, Batch, Ragged
from headrace.contract.training import CURRENT
from headrace.errors import EngineError
from headrace_fsdp.checkpoint import FORMAT, read_parts, stored_names, write_parts
from headrace_fsdp.muon import ShardedMuon
from headrace_fsdp.network import Scorer, build_scorer, copy_parts, read_stored
from headrace_fsdp.settings import FsdpTrainingSettings
from headrace_fsdp.step import ShardStep, ShardUpdater
from headrace_torch.arrays import as_numpy
from headrace_torch.checkpoint import write_side_files
from headrace_torch.model import ModelConfig
from headrace_torch.ranks.group import agreed, join, leave
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
    Stepped,
)
from headrace_torch.trainer.optimizers import Optimizer
from headrace_torch.trainer.packing import Plan, make_plan
from headrace_torch.trainer.parameters import Parameters
from headrace_torch.trainer.resume import random_state, set_random_state
from headrace_torch.trainer.schedule import Schedule
from headrace_torch.trainer.scoring import require_critic

WEIGHTS, OPTIMIZER = "weights/", "optimizer/"
"""Prefixes of names in a saved state. A snapshot's is ``snapshot-N/``, a rank's random state's ``random-N/``."""


class Shard:
    """See :class:`~headrace_torch.ranks.orders.Shard`."""

    Settings: ClassVar[type[Any]] = FsdpTrainingSettings

    def __init__(self, setup: Setup) -> None:
        """Meets the other ranks and loads the model. EngineError when a GPU or the model is not there."""
        settings = setup.settings
        if settings.device == "cuda" and torch.cuda.device_count() < settings.ranks:
            raise EngineError(
                f"{settings.ranks} ranks need as many GPUs, and torch sees {torch.cuda.device_count()}",
                origin=setup.name,
                fix='set ranks to the number of GPUs, or device = "cpu"',
            )
        torch.set_num_threads(setup.threads)
        torch.manual_seed(setup.seed + setup.rank)
        self._settings, self._rank, self._values = settings, setup.rank, setup.values
        self._model_path = setup.model_path
        self.config = ModelConfig.from_directory(setup.model_path)
        join(
            setup.rendezvous,
            rank=setup.rank,
            ranks=settings.ranks,
            device=settings.device,
            seconds=settings.rank_deadline,
        )
        self._mesh = init_device_mesh(settings.device, (settings.ranks,))
        self._snapshots: dict[str, Scorer] = {}
        self._step: ShardStep | None = None
        self._idle = _plan_of(_idle_batch(), self.config)
        try:
            self._scorer = self._new_scorer()
            agreed(lambda: read_stored(self._scorer, setup.model_path, rank=setup.rank))
        except BaseException:  # whatever it was, the next engine must be able to join; raised again
            leave()
            raise
        self._updater = self._new_updater(setup)

    def _new_updater(self, setup: Setup) -> ShardUpdater:
        settings, parameters = self._settings, Parameters(self._scorer.network, dtype=torch.float32)
        return ShardUpdater(
            parameters=parameters,
            optimizer=Optimizer(
                parameters.masters,
                name=settings.optimizer,
                learning_rate=settings.learning_rate,
                adamw_learning_rate=settings.adamw_learning_rate,
                betas=settings.betas,
                eps=settings.eps,
                weight_decay=settings.weight_decay,
                muon=ShardedMuon,
            ),
            schedule=Schedule(
                name=settings.schedule,
                warmup_steps=settings.warmup_steps,
                total_steps=setup.total_steps,
                final_share=settings.final_learning_rate_share,
            ),
            learning_rate=settings.learning_rate,
            max_gradient_norm=settings.max_gradient_norm,
        )

    def _new_scorer(self) -> Scorer:
        return build_scorer(self.config, self._settings, self._mesh, values=self._values)

    @property
    def steps(self) -> int:
        """Optimiser steps applied."""
        return self._updater.steps

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the model's tensors, in their order."""
        return {name: tuple(p.shape) for name, p in self._scorer.model.named_parameters()}

    @property
    def identity(self) -> dict[str, object]:
        """See :class:`~headrace_torch.ranks.orders.Shard`."""
        return {"format": FORMAT, "model": self.config.to_json(), "optimizer": self._settings.optimizer}

    def describe(self, directory: Path) -> None:
        """See :class:`~headrace_torch.ranks.orders.Shard`."""
        write_side_files(directory, self.config, dtype=self._settings.dtype, like=self._model_path)

    @property
    def _masters(self) -> Mapping[str, Tensor]:
        return self._updater.parameters.masters

    @singledispatchmethod
    def do(self, order: Order) -> Done:
        """RefusedOrderError when all ranks leave it; anything else that is raised has put the ranks out of step."""
        raise TypeError(f"no order: {order!r}")

    # ------------------------------------------------------------ steps

    @do.register
    def _begin(self, order: Begin) -> Done:
        self._step = agreed(lambda: ShardStep(self._updater, self._scorer, self._idle, order))
        return DONE

    @do.register
    def _accumulate(self, order: Accumulate) -> Done:
        assert self._step is not None
        self._step.accumulate(order.batch, lambda batch: _plan_or_none(batch, self.config))
        return DONE

    @do.register
    def _finish(self, order: Finish) -> Done:
        assert self._step is not None
        stepped: Stepped = self._step.finish(order.denominator)
        self._step = None
        return Done(stepped=stepped)

    @do.register
    def _discard(self, order: Discard) -> Done:
        self._step = None
        self._updater.parameters.clear()
        return DONE

    # ------------------------------------------------------------ scores and weights

    @do.register
    @torch.no_grad()
    def _score(self, order: Score) -> Done:
        scorer = self._scorer if order.weights == CURRENT else self._snapshots[order.weights]

        def planned() -> Plan | None:
            if "values" in order.outputs:
                require_critic(scorer.network)
            return _plan_or_none(order.batch, self.config)

        plan = agreed(planned)
        scores = scorer(plan or self._idle, order.temperature, order.outputs)
        scorer.end_pass()
        if plan is None:
            return DONE
        return Done(outputs={name: _scattered(scores[name], plan, order.batch) for name in order.outputs})

    @do.register
    @torch.no_grad()
    def _gather(self, order: Gather) -> Done:
        part = self._masters[order.name].detach().to(getattr(torch, self._settings.dtype))
        whole = part.full_tensor()  # type: ignore[attr-defined]  # it is a DTensor
        return DONE if self._rank else Done(outputs={order.name: as_numpy(whole.cpu())})

    @do.register
    def _freeze(self, order: Freeze) -> Done:
        self._snapshots[order.name] = self._frozen(self._masters, into=self._snapshots.get(order.name))
        return DONE

    @do.register
    def _drop(self, order: Drop) -> Done:
        self._snapshots.pop(order.name, None)
        return DONE

    def _frozen(self, weights: Mapping[str, Tensor], *, into: Scorer | None = None) -> Scorer:
        scorer = into or self._new_scorer().requires_grad_(False)
        copy_parts(dict(scorer.network.named_parameters()), weights)
        return scorer

    # ------------------------------------------------------------ saves

    @do.register
    def _save(self, order: Save) -> Done:
        optimizer = self._updater.optimizer.state().items()
        tensors: dict[str, Tensor] = {WEIGHTS + name: p.detach() for name, p in self._masters.items()}
        tensors |= {OPTIMIZER + name: t for name, t in optimizer if t.ndim or not self._rank}
        tensors |= {f"random-{self._rank}/{device}": state for device, state in random_state().items()}
        for number, name in enumerate(order.snapshots):
            frozen = self._snapshots[name].network.named_parameters()
            tensors |= {f"snapshot-{number}/{parameter}": p.detach() for parameter, p in frozen}
        agreed(lambda: write_parts(tensors, order.path, rank=self._rank))
        return DONE

    @do.register
    @torch.no_grad()
    def _load(self, order: Load) -> Done:
        weights, optimizer = self._blank(), self._updater.optimizer.blank_state() if order.steps else {}
        snapshots = [self._blank() for _ in order.snapshots]
        random = random_state()
        tensors = {WEIGHTS + name: t for name, t in weights.items()}
        tensors |= {OPTIMIZER + name: t for name, t in optimizer.items()}
        for number, parameters in enumerate(snapshots):
            tensors |= {f"snapshot-{number}/{name}": t for name, t in parameters.items()}

        def read() -> None:
            kept = {f"random-{self._rank}/{device}": state for device, state in random.items()}
            there = stored_names(order.path)  # of a rank that was not there, there is no random state to go on from
            read_parts(tensors | {name: state for name, state in kept.items() if name in there}, order.path)

        agreed(read)
        # Nothing below can fail: a refused state has changed nothing.
        copy_parts(self._masters, weights)
        self._updater.optimizer.load_state(optimizer)
        self._updater.steps = order.steps
        frozen = zip(order.snapshots, snapshots, strict=True)
        self._snapshots = {name: self._frozen(parameters) for name, parameters in frozen}
        set_random_state(random)
        return DONE

    def _blank(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(p, requires_grad=False) for name, p in self._masters.items()}

    def close(self) -> None:
        """Leave the group."""
        leave()


def _plan_or_none(batch: Batch, config: ModelConfig) -> Plan | None:
    return make_plan(batch, vocabulary=config.vocab_size)


def _plan_of(batch: Batch, config: ModelConfig) -> Plan:
    plan = _plan_or_none(batch, config)
    assert plan is not None
    return plan


def _idle_batch() -> Batch:
    """What a rank without rows computes, for the others' sake."""
    tokens = Ragged.from_arrays([np.zeros(2, dtype=np.int32)])
    mask = tokens.like(np.array([False, True]))
    weights = tokens.like(np.zeros(2, dtype=np.float32))
    return Batch(rows=np.zeros(1, dtype=np.int64), columns={TOKENS: tokens, LOSS_MASK: mask, LOSS_WEIGHTS: weights})


def _scattered(scores: Tensor, plan: Plan, batch: Batch) -> Array:
    values = np.zeros(len(batch.ragged(TOKENS).values), dtype=np.float32)
    values[plan.trainable] = scores.cpu().numpy()
    return values
