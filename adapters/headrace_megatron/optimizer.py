"""Megatron's distributed AdamW: each data-parallel rank keeps a part of masters and moments.

Without Transformer Engine or Apex, Megatron-Core 0.19.2 falls back to torch's AdamW, and what it saves of that is
mended here (see :func:`_mend`). Invariant: an update whose loss or gradient is not finite changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from headrace_megatron.engine import (
    HAVE_APEX_OR_TE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    OptimizerConfig,
    finalize_model_grads,
    get_megatron_optimizer,
)
from headrace_megatron.settings import MegatronTrainingSettings
from headrace_torch.trainer.schedule import Schedule
from headrace_torch.trainer.update import Update


def with_gradients(model: Any, config: Any) -> Any:
    """Megatron's wrapper, whose gradients are float32 sums over everything that is computed until they are cleared."""
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
    )
    return DistributedDataParallel(config, options, model)


class MegatronUpdater:
    """Everything that an optimiser step reads and writes; ``steps`` counts those applied. Collective."""

    def __init__(self, model: Any, settings: MegatronTrainingSettings, schedule: Schedule) -> None:
        """``model``: of :func:`with_gradients`, filled."""
        self.steps = 0
        self._model, self._settings, self._schedule = model, settings, schedule
        dtype = getattr(torch, settings.dtype)
        options = OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            clip_grad=0.0,
        )
        self.optimizer = get_megatron_optimizer(options, [model])
        for part in _distributed(self.optimizer):
            _mend(part)

    def update(self, *, loss: float, denominator: float) -> Update:
        """Sum the gradients over ranks, scale them by 1 / ``denominator`` (> 0), and step if ``loss`` and they are
        finite."""
        finalize_model_grads([self._model])
        self._model.scale_gradients(1.0 / denominator)
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        share = self._schedule.share(self.steps)
        applied = math.isfinite(loss) and math.isfinite(norm)
        if applied:
            if norm > self._settings.max_gradient_norm:
                self._model.scale_gradients(self._settings.max_gradient_norm / norm)
                self.optimizer.prepare_grads()
            for group in self.optimizer.param_groups:
                group["lr"] = self._settings.learning_rate * share
                group["weight_decay"] = self._settings.weight_decay * group["wd_mult"]
            self.optimizer.step_with_ready_grads()
            self.steps += 1
        self.clear()
        return Update(applied=applied, gradient_norm=norm, learning_rate=self._settings.learning_rate * share)

    def skip(self) -> Update:
        """An update without trainable tokens."""
        self.clear()
        rate = self._settings.learning_rate * self._schedule.share(self.steps)
        return Update(applied=False, gradient_norm=0.0, learning_rate=rate)

    def clear(self) -> None:
        """Forget all gradients."""
        self._model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def make_state(self) -> None:
        """Have moments, zero before the first step: what is not there is neither saved nor read into."""
        if HAVE_APEX_OR_TE:
            return
        for part in _distributed(self.optimizer):
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    state.setdefault("step", torch.zeros(()))
                    state.setdefault("exp_avg", torch.zeros_like(parameter))
                    state.setdefault("exp_avg_sq", torch.zeros_like(parameter))


def _distributed(optimizer: Any) -> Iterator[Any]:
    """Of a chain: one for what all ranks have, and one for experts."""
    yield from getattr(optimizer, "chained_optimizers", [optimizer])


def _mend(optimizer: Any) -> None:
    """Read torch's AdamW state as it was saved. Megatron does not save a parameter's ``step`` and misses it on reading;
    and it gives all parameters one tensor for it, which then counts every step once for each of them."""
    if HAVE_APEX_OR_TE:
        return
    load, fill = optimizer.load_state_dict, optimizer._set_main_param_and_optimizer_states

    def load_state_dict(state: Any) -> None:
        load(state)
        for each in optimizer.optimizer.state.values():
            each["step"] = each["step"].clone()

    @torch.no_grad()
    def filled(parameter: Any, tensors: Any) -> None:
        fill(parameter, {"step": None, **tensors})

    optimizer.load_state_dict, optimizer._set_main_param_and_optimizer_states = load_state_dict, filled
