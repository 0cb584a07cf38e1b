"""An optimiser step in progress. Invariant: gradients stay unnormalised sums until :meth:`GradientStep.finish`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from headrace.contract.columns import Batch
from headrace.contract.loss import LossSpec
from headrace.contract.training import StepResult, TrainingStep
from headrace_torch.trainer.losses import Loss, MetricSums
from headrace_torch.trainer.packing import make_plan
from headrace_torch.trainer.scoring import require_temperature, score_plan
from headrace_torch.trainer.update import Update, Updater


class GradientStep(TrainingStep):
    """Accumulates micro-batches on an :class:`Updater`'s parameters; ``ended`` is called once, when it is over."""

    def __init__(self, updater: Updater, spec: LossSpec, *, ended: Callable[[], None]) -> None:
        require_temperature(spec.temperature)
        self._updater = updater
        self._loss = Loss(spec)
        self._ended = ended
        self._open = True
        self._metrics = MetricSums()
        self._numerators: list[torch.Tensor] = []

    def accumulate(self, batch: Batch) -> None:
        """See :class:`TrainingStep`. ContractError names the loss that asks for an absent column or returns
        something else than a sum."""
        self._require_open()
        network, spec = self._updater.parameters.network, self._loss.spec
        plan = make_plan(batch, vocabulary=network.model.config.vocab_size)
        if plan is None:
            return
        columns = self._loss.columns(batch, plan)
        scores = score_plan(network, plan, temperature=spec.temperature, outputs=self._loss.outputs)
        output = self._loss(self._loss.inputs(batch, plan, columns, scores))
        output.numerator.backward()
        self._updater.parameters.collect()
        self._numerators.append(output.numerator.detach().double())
        self._metrics.add(output.metrics)

    def finish(self, *, denominator: float) -> StepResult:
        """See :class:`TrainingStep`. ValueError when the denominator is negative or not finite."""
        self._require_open()
        if not 0.0 <= denominator < math.inf:
            raise ValueError(f"the denominator of a step must be finite and at least 0, got {denominator}")
        metrics = self._metrics.merged()
        self._close()
        loss, update = self._update(denominator)
        return StepResult(
            applied=update.applied,
            loss=loss,
            gradient_norm=update.gradient_norm,
            learning_rate=update.learning_rate,
            metrics=metrics,
        )

    def discard(self) -> None:
        """See :class:`TrainingStep`; a step that is over is left alone."""
        if self._open:
            self._close()
            self._updater.parameters.clear()

    def _update(self, denominator: float) -> tuple[float, Update]:
        if denominator == 0.0:
            return 0.0, self._updater.skip()
        loss = sum(float(numerator) for numerator in self._numerators) / denominator
        return loss, self._updater.update(loss=loss, denominator=denominator)

    def _require_open(self) -> None:
        if not self._open:
            raise ValueError("this training step is over; begin another")

    def _close(self) -> None:
        self._open = False
        self._ended()
