"""Optimisers behind one small surface: a step at a share of the full rate, and state as named tensors.

``adamw``: AdamW (Loshchilov & Hutter 2019) for everything. ``muon``: :mod:`headrace_torch.trainer.muon` for the
matrices of the layers, and AdamW for embedding, norms and head. Weight decay applies to matrices only. Invariant: the
state is complete, so that saving and loading it changes no bit of what follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from headrace_torch.trainer.muon import Muon
from headrace_torch.trainer.parameters import require_shapes

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
        muon: type[Muon] = Muon,
    ) -> None:
        """``adamw_learning_rate``: of the parameters that AdamW updates beside Muon; ``adamw`` alone ignores it.
        ``muon``: what updates the matrices of layers, for parameters that are in parts."""
        self._names = {parameter: name for name, parameter in parameters.items()}
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
            matrices = muon(list(hidden.values()), lr=learning_rate, weight_decay=weight_decay)
            self._parts.append(_Part(optimizer=matrices, rate=learning_rate, quantities=("momentum_buffer",)))

    def step(self, *, share: float) -> None:
        """Update the parameters from their gradients at ``share`` of the full rates."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = part.rate * share
            part.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """``parameter/quantity`` → tensor; empty before the first step."""
        return {
            key: part.optimizer.state[parameter][quantity]
            for part in self._parts
            for parameter, quantity, key in self._entries(part)
            if parameter in part.optimizer.state
        }

    def blank_state(self) -> dict[str, Tensor]:
        """Tensors to read a :meth:`state` of after a step into."""
        return {
            key: torch.zeros(()) if quantity == "step" else torch.zeros_like(parameter, requires_grad=False)
            for part in self._parts
            for parameter, quantity, key in self._entries(part)
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the state: what :meth:`state` gave after at least one step, or nothing. ValueError names a quantity
        that is absent, of another shape or not this optimiser's, and the state stays what it was."""
        shapes = {
            key: torch.Size() if quantity == "step" else parameter.shape
            for part in self._parts
            for parameter, quantity, key in self._entries(part)
        }
        require_shapes(tensors, shapes if tensors else {})
        for part in self._parts:
            state: dict[int, dict[str, Tensor]] = {}
            if tensors:
                index = {parameter: i for i, parameter in enumerate(part.members)}
                for parameter, quantity, key in self._entries(part):
                    state.setdefault(index[parameter], {})[quantity] = tensors[key]
            part.optimizer.load_state_dict(
                {"state": state, "param_groups": part.optimizer.state_dict()["param_groups"]}
            )

    def _entries(self, part: _Part) -> Iterator[tuple[nn.Parameter, str, str]]:
        """(parameter, quantity, key in :meth:`state`)."""
        for parameter in part.members:
            for quantity in part.quantities:
                yield parameter, quantity, f"{self._names[parameter]}/{quantity}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    optimizer: torch.optim.Optimizer
    rate: float
    quantities: tuple[str, ...]
    """Keys of a parameter's state."""

    @property
    def members(self) -> list[nn.Parameter]:
        """In the order of torch's state dictionaries."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
