"""An optimiser step on several ranks. Invariant: gradients stay unnormalised sums, over ranks too, until the end."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headrace.contract.columns import Batch
from headrace.contract.loss import LossOutput
from headrace_fsdp.network import Scorer, local
from headrace_torch.ranks.group import RefusedOrderError, agreed, total
from headrace_torch.ranks.orders import Begin, Stepped
from headrace_torch.ranks.plugins import offer
from headrace_torch.trainer.losses import Loss, LossColumns, MetricSums
from headrace_torch.trainer.packing import Plan
from headrace_torch.trainer.scoring import require_critic
from headrace_torch.trainer.update import Updater


class ShardUpdater(Updater):
    """Of parameters that are in parts."""

    def norm(self, tensors: list[Tensor]) -> float:
        """Over the parts of all ranks; collective."""
        norms = torch.stack(torch._foreach_norm([local(tensor) for tensor in tensors]))
        (squares,) = total(float(norms.double().square().sum()))
        return math.sqrt(squares)


class ShardStep:
    """This rank's part of a step."""

    def __init__(self, updater: Updater, scorer: Scorer, idle: Plan, order: Begin) -> None:
        """``idle``: what is computed where there are no rows. ContractError when the loss cannot be imported."""
        offer(order.loss.function.partition(":")[0], order.file)
        self._updater, self._scorer, self._idle = updater, scorer, idle
        self._loss = Loss(order.loss)
        self._metrics = MetricSums()
        self._numerators: list[Tensor] = []

    def accumulate(self, batch: Batch, planned: Callable[[Batch], Plan | None]) -> None:
        """Add the sums of ``batch``, this rank's rows."""

        def read() -> tuple[Plan | None, LossColumns | None]:
            if self._loss.spec.values:
                require_critic(self._scorer.network)
            plan = planned(batch)
            return plan, None if plan is None else self._loss.columns(batch, plan)

        plan, columns = agreed(read)
        if total(plan is not None) == [0.0]:
            return
        scores = self._scorer(plan or self._idle, self._loss.spec.temperature, self._loss.outputs)
        # FSDP reduces the gradients that are there: every rank has one for all that every output depends on.
        bound = torch.stack([torch.nan_to_num(score).sum() for score in scores.values()]).sum() * 0.0

        def judged() -> LossOutput | None:
            if plan is None or columns is None:
                return None
            return self._loss(self._loss.inputs(batch, plan, columns, scores))

        try:
            output = agreed(judged)
        except RefusedOrderError:
            torch.autograd.backward(bound)  # adds nothing, and ends what the forward pass began
            raise
        if output is None:
            torch.autograd.backward(bound)
            return
        torch.autograd.backward(output.numerator + bound)
        self._numerators.append(output.numerator.detach().double())
        self._metrics.add(output.metrics)

    def finish(self, denominator: float) -> Stepped:
        """Scale, clip, step."""
        metrics = agreed(self._metrics.merged)
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
