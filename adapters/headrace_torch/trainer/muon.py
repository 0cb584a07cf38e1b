"""Muon (Jordan et al. 2024) for matrices, at AdamW's root mean square (Liu et al. 2025, section 2.2).

torch's own Muon orthogonalises one matrix at a time and always in bfloat16, which a CPU without bfloat16 arithmetic
does more than ten times slower than float32. Here matrices of one shape go together, in float32 on a CPU. Invariant:
the update is a function of gradient and momentum alone, matrix by matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration (Jordan et al. 2024): steep at 0, so that five rounds bring singular values near 1."""
_ROUNDS = 5
_SMALLEST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Momentum (Nesterov), orthogonalised; decoupled weight decay."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        """``parameters``: 2-D."""
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # a step here never evaluates the loss
        """W ← (1 - lr * decay) * W - lr * 0.2 * sqrt(max(rows, columns)) * orthogonalised(momentum)."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in shapes.items():
                updates = self.orthogonalised([self._momentum(p) for p in parameters])
                rate = group["lr"] * 0.2 * max(shape) ** 0.5
                torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, updates, alpha=-rate)

    def orthogonalised(self, matrices: list[Tensor]) -> list[Tensor]:
        """:func:`orthogonalised` of matrices of one shape, each in its own dtype."""
        return list(orthogonalised(torch.stack(matrices)).to(matrices[0].dtype).unbind())

    def _momentum(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(parameter.grad, 1.0 - _MOMENTUM)
        return parameter.grad.lerp(buffer, _MOMENTUM)


def orthogonalised(matrices: Tensor) -> Tensor:
    """[n, r, c] → the same shape, singular values brought near 1 (0.7 to 1.2) and singular vectors kept."""
    x = matrices if matrices.device.type == "cpu" else matrices.bfloat16()
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_SMALLEST_NORM)
    a, b, c = _COEFFICIENTS
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
