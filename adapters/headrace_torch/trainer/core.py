"""The training engine proper: one model, its optimiser and its snapshots, on one device.

Invariant: a started trainer is always between two optimiser steps or inside exactly one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.contract.columns import LOSS_MASK, TOKENS, Array, Batch, Ragged
from headrace.contract.loss import LossSpec
from headrace.contract.training import CURRENT, ForwardOutput, SaveKind, TrainingContext
from headrace.contract.weights import WeightSource
from headrace.errors import EngineError
from headrace_torch.checkpoint import load_model, save_model
from headrace_torch.model import Decoder
from headrace_torch.trainer.lora import AdaptedWeights, BaseWeights, add_adapter, merged
from headrace_torch.trainer.optimizers import Optimizer
from headrace_torch.trainer.packing import make_plan, split_rows
from headrace_torch.trainer.parameters import ModelWeights, Network, Parameters, ValueHead
from headrace_torch.trainer.resume import (
    TrainingState,
    load_state,
    new_directory,
    random_state,
    restoring,
    save_state,
    set_random_state,
)
from headrace_torch.trainer.schedule import Schedule
from headrace_torch.trainer.scoring import require_temperature, score_plan
from headrace_torch.trainer.step import GradientStep
from headrace_torch.trainer.update import Updater
from headrace_torch.training_settings import TorchTrainingSettings

FORWARD_TOKENS = 16384
"""Tokens per pass when nothing is kept for a gradient."""


class Trainer:
    """What :class:`~headrace_torch.training.TorchTrainingEngine` is between ``start`` and ``close``."""

    def __init__(self, settings: TorchTrainingSettings, context: TrainingContext) -> None:
        """Loads the model. EngineError when it or the device is not there, or an adapter is to be quantised."""
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise EngineError("device is 'cuda' and torch sees no GPU", origin=context.name, fix='set device = "cpu"')
        if settings.lora is not None and context.quantization is not None:
            raise EngineError(
                "an adapter is not trained in a quantisation scheme's arithmetic: its base would stay low-bit for good",
                origin=context.name,
                fix="train without lora, or without quantization",
            )
        torch.set_num_threads(context.threads)
        torch.manual_seed(context.seed)
        self._settings = settings
        self._model_path = context.model_path
        self._snapshots: dict[str, Network] = {}
        self._stepping = False
        model = load_model(context.model_path, dtype=torch.float32, device=settings.device)
        if settings.lora is not None:
            add_adapter(model, settings.lora, seed=context.seed)
        self._base = BaseWeights(model) if settings.lora is not None else None
        """What an adapter is for."""
        critic = ValueHead(model.config.hidden_size).to(settings.device) if context.values else None
        dtype = getattr(torch, settings.dtype)
        parameters = Parameters(Network(model, critic), dtype=dtype, scheme=context.quantization)
        self._updater = Updater(
            parameters=parameters,
            optimizer=Optimizer(
                parameters.masters,
                name=settings.optimizer,
                learning_rate=settings.learning_rate,
                adamw_learning_rate=settings.adamw_learning_rate,
                betas=settings.betas,
                eps=settings.eps,
                weight_decay=settings.weight_decay,
            ),
            schedule=Schedule(
                name=settings.schedule,
                warmup_steps=settings.warmup_steps,
                total_steps=context.total_steps,
                final_share=settings.final_learning_rate_share,
            ),
            learning_rate=settings.learning_rate,
            max_gradient_norm=settings.max_gradient_norm,
        )

    @property
    def _model(self) -> Decoder:
        return self._updater.parameters.network.model

    @torch.inference_mode()
    def forward(
        self, batch: Batch, *, outputs: tuple[ForwardOutput, ...], weights: str, temperature: float
    ) -> dict[str, Ragged]:
        """See the contract. ValueError for an unknown snapshot."""
        require_temperature(temperature)
        network = self._named(weights)
        tokens = batch.ragged(TOKENS)
        needed = Batch(rows=batch.rows, columns={TOKENS: tokens, LOSS_MASK: batch.ragged(LOSS_MASK)})
        values = {name: np.zeros(len(tokens.values), dtype=np.float32) for name in outputs}
        for rows in split_rows(needed, tokens=FORWARD_TOKENS):
            start = int(tokens.offsets[rows[0]])
            self._score(network, needed.take(rows), temperature, {n: v[start:] for n, v in values.items()})
        return {name: tokens.like(v) for name, v in values.items()}

    def _score(self, network: Network, batch: Batch, temperature: float, values: Mapping[ForwardOutput, Array]) -> None:
        """Write the trainable tokens' outputs into ``values``, which begin at the batch's first token."""
        plan = make_plan(batch, vocabulary=network.model.config.vocab_size)
        if plan is None:
            return
        scores = score_plan(network, plan, temperature=temperature, outputs=values)
        for name, value in values.items():
            value[plan.trainable] = scores[name].cpu().numpy()

    def begin_step(self, loss: LossSpec) -> GradientStep:
        """See the contract. ValueError while another step is open."""
        if self._stepping:
            raise ValueError("a training step is open; finish or discard it before beginning another")
        step = GradientStep(self._updater, loss, ended=self._end_step)
        self._stepping = True
        return step

    def _end_step(self) -> None:
        self._stepping = False

    def weight_source(self) -> WeightSource:
        """What the current weights compute with, in the engine's dtype or low-bit."""
        if self._base is not None:
            return AdaptedWeights(self._model, self._base)
        return ModelWeights(self._updater.parameters)

    def snapshot(self, name: str) -> None:
        """Freeze the current weights. ValueError for the name of the current ones."""
        if name == CURRENT:
            raise ValueError(f"{CURRENT!r} names the weights being trained")
        self._snapshots[name] = self._updater.parameters.network.frozen()

    def drop_snapshot(self, name: str) -> None:
        """Free a snapshot; an unknown one is ignored."""
        self._snapshots.pop(name, None)

    def save(self, path: str, *, kind: SaveKind) -> None:
        """See the contract."""
        if self._stepping:
            raise ValueError("a training step is open; finish or discard it before saving")
        if kind == "export":
            with new_directory(path, marker="config.json") as directory:
                save_model(merged(self._model), str(directory), like=self._model_path)
            return
        state = TrainingState(
            model=self._model.config.to_json(),
            optimizer=self._settings.optimizer,
            adapter=self._adapter,
            steps=self._updater.steps,
            weights=self._updater.parameters.masters,
            optimizer_state=self._updater.optimizer.state(),
            random_state=random_state(),
            snapshots={n: self._updater.parameters.state_of(network) for n, network in self._snapshots.items()},
        )
        save_state(state, path)

    @property
    def _adapter(self) -> dict[str, Any] | None:
        """Of what adapter of what base a state is."""
        lora = self._settings.lora
        return None if lora is None or self._base is None else {**asdict(lora), "base": self._base.digest}

    def load(self, path: str) -> None:
        """See the contract."""
        if self._stepping:
            raise ValueError("a training step is open; finish or discard it before loading")
        state = load_state(
            path,
            model=self._model.config.to_json(),
            optimizer=self._settings.optimizer,
            adapter=self._adapter,
        )
        restoring(path, lambda: self._restore(state))

    def _restore(self, state: TrainingState) -> None:
        if state.steps and not state.optimizer_state:
            raise ValueError(f"no optimiser state after {state.steps} steps")
        self._updater.parameters.require_fit(state.weights)
        snapshots = {name: self._frozen(tensors) for name, tensors in state.snapshots.items()}
        self._updater.optimizer.load_state(state.optimizer_state)
        # Nothing below can fail: a refused state has changed nothing.
        self._updater.parameters.assign(state.weights)
        self._snapshots = snapshots
        self._updater.steps = state.steps
        set_random_state(state.random_state)

    def _frozen(self, tensors: Mapping[str, Tensor]) -> Network:
        self._updater.parameters.require_fit(tensors)
        return self._updater.parameters.frozen(tensors)

    def close(self) -> None:
        """Free the snapshots; the rest goes with this object."""
        self._snapshots.clear()

    def _named(self, weights: str) -> Network:
        if weights == CURRENT:
            return self._updater.parameters.network
        try:
            return self._snapshots[weights]
        except KeyError:
            raise ValueError(f"no snapshot {weights!r}; there are {sorted(self._snapshots)}") from None
