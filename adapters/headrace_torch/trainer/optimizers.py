"""Optimisers behind one small surface: a step at a share of the full rate, and state as named tensors.

``adamw``: AdamW (Loshchilov & Hutter 2019) for everything. ``muon``: :mod:`headrace_torch.trainer.muon` for the
matrices of the layers, and AdamW for embedding, norms and head. Weight decay applies to matrices only. Invariant: the
state is complete, so that saving and loading it changes no bit of what follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from headrace_torch.trainer.muon import Muon

OptimizerName = Literal["adamw", "muon"]


class Optimizer:
    """One or two torch optimisers over named float32 parameters."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        name: OptimizerName,
        learning_rate: float,
        adamw_learning_rate: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """``adamw_learning_rate``: of the parameters that AdamW updates beside Muon; ``adamw`` alone ignores it."""
        self._parameters = dict(parameters)
        hidden = {n: p for n, p in parameters.items() if name == "muon" and p.ndim == 2 and ".layers." in n}
        rest = [p for n, p in parameters.items() if n not in hidden]
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        rate = adamw_learning_rate if name == "muon" else learning_rate
        adamw = torch.optim.AdamW(groups, lr=rate, betas=betas, eps=eps, fused=True)
        self._parts = [_Part(optimizer=adamw, rate=rate, quantities=("step", "exp_avg", "exp_avg_sq"))]
        if hidden:
            muon = Muon(list(hidden.values()), lr=learning_rate, weight_decay=weight_decay)
            self._parts.append(_Part(optimizer=muon, rate=learning_rate, quantities=("momentum_buffer",)))

    def step(self, *, share: float) -> None:
        """Update the parameters from their gradients at ``share`` of the full rates."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = part.rate * share
            part.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """``parameter/quantity`` → tensor; empty before the first step."""
        return {
            f"{name}/{quantity}": part.optimizer.state[parameter][quantity]
            for part in self._parts
            for name, parameter in self._parameters.items()
            if parameter in part.optimizer.state
            for quantity in part.quantities
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the state: what :meth:`state` gave after at least one step, or nothing. KeyError names a
        quantity that is absent or not this optimiser's."""
        names = {parameter: name for name, parameter in self._parameters.items()}
        unused = set(tensors)
        for part in self._parts:
            members = [p for group in part.optimizer.param_groups for p in group["params"]]
            state = {}
            for index, parameter in enumerate(members if tensors else ()):
                keys = {quantity: f"{names[parameter]}/{quantity}" for quantity in part.quantities}
                state[index] = {quantity: tensors[key] for quantity, key in keys.items()}
                unused.difference_update(keys.values())
            groups = part.optimizer.state_dict()["param_groups"]
            part.optimizer.load_state_dict({"state": state, "param_groups": groups})
        if unused:
            raise KeyError(min(unused))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    optimizer: torch.optim.Optimizer
    rate: float
    quantities: tuple[str, ...]
    """Keys of a parameter's state."""
