"""An optimiser step. Invariant: gradients stay unnormalised sums, over ranks too, until the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.contract.columns import Batch
from headrace.contract.training import ForwardOutput
from headrace.errors import ContractError
from headrace_megatron.layout import Layout
from headrace_megatron.micro_batches import MicroBatch
from headrace_megatron.optimizer import MegatronUpdater
from headrace_megatron.scoring import run
from headrace_torch.ranks.group import RefusedOrderError, agreed, total
from headrace_torch.ranks.orders import Begin, Stepped
from headrace_torch.ranks.plugins import offer
from headrace_torch.trainer.losses import Loss, LossColumns, MetricSums

Planned = Callable[[Batch], Sequence[MicroBatch]]


class MegatronStep:
    """This rank's part of a step."""

    def __init__(self, updater: MegatronUpdater, model: Any, layout: Layout, order: Begin) -> None:
        """ContractError when the loss cannot be imported, or reads a critic."""
        offer(order.loss.function.partition(":")[0], order.file)
        self._updater, self._model, self._layout = updater, model, layout
        self._loss = Loss(order.loss)
        if order.loss.values:
            raise no_critic()
        self._metrics = MetricSums()
        self._numerators: list[Tensor] = []
        self._spoilt = False

    def accumulate(
        self, batch: Batch, planned: Planned, levelled: Callable[[Sequence[MicroBatch]], Sequence[MicroBatch]]
    ) -> None:
        """Add the sums of ``batch``, the rows of this rank's share. ``levelled``: collective, gives with them what this
        rank has to compute for the others' sake."""

        def read() -> tuple[Sequence[MicroBatch], dict[int, LossColumns]]:
            if self._spoilt:
                raise ContractError("this step lost a part of a batch", fix="discard it, and begin another")
            batches = planned(batch)
            return batches, {id(each): self._loss.columns(each.batch, each.plan) for each in batches}

        batches, columns = agreed(read)
        failures: list[Exception] = []

        def judge(each: MicroBatch, scores: Mapping[ForwardOutput, Tensor]) -> Tensor:
            idle = torch.nan_to_num(torch.stack(list(scores.values()))).sum() * 0.0
            if id(each) not in columns or failures:
                return idle
            try:
                output = self._loss(self._loss.inputs(each.batch, each.plan, columns[id(each)], scores))
            except Exception as error:  # a loss is a plugin's; raised below, when the other stages are not waiting
                failures.append(error)
                return idle
            if self._layout.speaks:
                self._numerators.append(output.numerator.detach().double())
                self._metrics.add(output.metrics)
            numerator: Tensor = output.numerator
            return numerator

        work = levelled(batches)
        if work:
            spec = self._loss.spec
            run(self._model, work, judge, temperature=spec.temperature, outputs=self._loss.outputs, gradient=True)
        try:
            agreed(lambda: _raise_first(failures))
        except RefusedOrderError:
            self._spoilt = True  # other micro-batches have left their gradients
            raise

    def finish(self, denominator: float) -> Stepped:
        """Scale, clip, step."""

        def merged() -> Any:
            if self._spoilt:
                raise ContractError("this step lost a part of a batch", fix="discard it, and begin another")
            return self._metrics.merged()

        metrics = agreed(merged)
        if denominator == 0.0:
            loss, update = 0.0, self._updater.skip()
        else:
            (numerator,) = total(sum(float(part) for part in self._numerators))
            loss = numerator / denominator
            update = self._updater.update(loss=loss, denominator=denominator)
        return Stepped(
            applied=update.applied,
            loss=loss,
            gradient_norm=update.gradient_norm,
            learning_rate=update.learning_rate,
            metrics=metrics,
        )


def no_critic() -> ContractError:
    """For what reads one."""
    return ContractError(
        "values were asked of a training engine that keeps no critic",
        fix='use = "torch" or "fsdp" trains one, or choose an algorithm without',
    )


def _raise_first(failures: Sequence[Exception]) -> None:
    if failures:
        raise failures[0]
