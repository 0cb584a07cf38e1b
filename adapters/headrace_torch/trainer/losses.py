"""Calling an algorithm's loss: resolve it by name, give it its inputs, check what it returns.

Invariant: a loss that asks for what the batch lacks, or returns something else than a sum with a gradient, is refused
by the name of its function; it is never trained on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast, get_args

import torch
from torch import Tensor

from headrace.contract.columns import LOSS_WEIGHTS, TOKENS, Array, Batch, Ragged
from headrace.contract.loss import LossInputs, LossOutput, LossSpec
from headrace.contract.metrics import Metric, Reduction, merge_metrics
from headrace.contract.training import ForwardOutput
from headrace.errors import ContractError
from headrace_torch.trainer.packing import Plan


class LossColumns(dict[str, Tensor]):
    """The columns a loss declared; reading another one is refused by name."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self._function = function

    def __missing__(self, name: str) -> NoReturn:
        raise ContractError(
            f"loss {self._function} reads column {name!r}, which it was not given; it was given {sorted(self)}",
            fix=f"name {name!r} in LossSpec.columns",
        )


class Loss:
    """A loss function with its settings and columns."""

    def __init__(self, spec: LossSpec) -> None:
        """ContractError when ``spec.function`` names nothing callable."""
        self.spec = spec
        self._function = _resolve(spec.function)

    @property
    def outputs(self) -> tuple[ForwardOutput, ...]:
        """What its inputs are made of."""
        found: list[ForwardOutput] = ["logprobs"]
        found += ["entropy"] if self.spec.entropy else []
        found += ["values"] if self.spec.values else []
        return tuple(found)

    def columns(self, batch: Batch, plan: Plan) -> LossColumns:
        """What the loss reads of the plan's trainable tokens, its weights among it. ContractError when the batch
        lacks a part: ask before computing the :attr:`outputs`, the costly part."""
        columns = LossColumns(self.spec.function)
        for name in (LOSS_WEIGHTS, *self.spec.columns):
            columns[name] = self._column(batch, name, plan)
        return columns

    def inputs(
        self, batch: Batch, plan: Plan, columns: LossColumns, scores: Mapping[ForwardOutput, Tensor]
    ) -> LossInputs:
        """``columns``: of :meth:`columns`, for this alone; ``scores``: the :attr:`outputs` of the plan's tokens."""
        logprobs = scores["logprobs"]
        device = logprobs.device
        for name, column in columns.items():
            columns[name] = column.to(device)
        weights = columns[LOSS_WEIGHTS].float()
        if LOSS_WEIGHTS not in self.spec.columns:
            del columns[LOSS_WEIGHTS]
        return LossInputs(
            logprobs=logprobs,
            weights=weights,
            sequence=torch.from_numpy(plan.sequence).to(device),
            sequences=len(batch),
            columns=columns,
            entropy=scores.get("entropy"),
            values=scores.get("values"),
        )

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """ContractError unless the answer is a LossOutput with a scalar numerator that has a gradient."""
        output = self._function(inputs, **self.spec.settings)
        if not isinstance(output, LossOutput):
            raise self._breach(f"returned {type(output).__name__}, expected a LossOutput")
        numerator = output.numerator
        if not isinstance(numerator, Tensor) or numerator.ndim != 0:
            shape = tuple(numerator.shape) if isinstance(numerator, Tensor) else type(numerator).__name__
            raise self._breach(f"returned a numerator of shape {shape}, expected a scalar: the sum over its tokens")
        if not numerator.requires_grad:
            raise self._breach("returned a numerator without gradient, expected one computed from LossInputs.logprobs")
        for name, parts in output.metrics.items():
            self._check_metric(name, parts)
        return output

    def _check_metric(self, name: str, parts: object) -> None:
        if not isinstance(parts, tuple) or len(parts) != 3 or parts[2] not in get_args(Reduction):
            raise self._breach(f"returned metric {name!r} as {parts!r}, expected (total, count, reduction)")
        for part in parts[:2]:
            if isinstance(part, Tensor) and part.numel() != 1:
                raise self._breach(f"returned metric {name!r} with a part of shape {tuple(part.shape)}, not a scalar")

    def _column(self, batch: Batch, name: str, plan: Plan) -> Tensor:
        column = batch.columns.get(name)
        if column is None:
            raise ContractError(
                f"loss {self.spec.function} needs column {name!r}; this batch has {sorted(batch.columns)}",
                fix=f"let the algorithm's prepare() return {name!r}, or declare that it needs it",
            )
        if not isinstance(column, Ragged):
            return _tensor(column)
        if not _same(column.offsets, batch.ragged(TOKENS).offsets):
            raise ContractError(f"column {name!r} of loss {self.spec.function} is not aligned with the tokens")
        return _tensor(column.values[plan.trainable])

    def _breach(self, what: str) -> ContractError:
        return ContractError(f"loss {self.spec.function} {what}", fix="see headrace.contract.loss.LossOutput")


class MetricSums:
    """Metrics of a step's micro-batches; tensors stay where they are until the step ends."""

    def __init__(self) -> None:
        self._parts: list[dict[str, tuple[Any, Any, Reduction]]] = []

    def add(self, metrics: Mapping[str, tuple[Any, Any, Reduction]]) -> None:
        """Keep one micro-batch's values, cut off from their graph."""
        self._parts.append({name: (_cut(parts[0]), _cut(parts[1]), parts[2]) for name, parts in metrics.items()})

    def merged(self) -> dict[str, Metric]:
        """One metric per name, over all micro-batches. ValueError when a name changed its reduction."""
        return merge_metrics(
            {
                name: Metric(total=float(total), count=float(count), reduction=reduction)
                for name, (total, count, reduction) in parts.items()
            }
            for parts in self._parts
        )


def _resolve(name: str) -> Callable[..., object]:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, ValueError, AttributeError) as error:
        raise ContractError(
            f"loss {name!r} cannot be imported: {error}", fix='LossSpec.function is "module:function"'
        ) from error
    if not callable(found):
        raise ContractError(f"loss {name!r} is not a function", fix='LossSpec.function is "module:function"')
    return cast(Callable[..., object], found)


def _tensor(values: Array) -> Tensor:
    return torch.from_numpy(values.copy() if not values.flags.writeable else values)


def _same(left: Array, right: Array) -> bool:
    return left is right or (len(left) == len(right) and bool((left == right).all()))


def _cut(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
