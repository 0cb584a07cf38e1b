"""float32 master parameters and the network that computes with them.

Parameters that want no gradient are not trained: they have no masters, and copies of the network share them.
In float32 the two are the same. In bfloat16 the model is a rounded copy: gradients are moved to the masters after each
backward pass and accumulate there. Under a quantisation scheme the model computes with what that makes of its
parameters. Invariant: whatever an optimiser reads or writes is float32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from headrace.contract.columns import Array
from headrace.contract.quantization import Quantization
from headrace.contract.weights import WeightSource
from headrace_torch.arrays import as_numpy
from headrace_torch.low_bit.layers import quantize_model
from headrace_torch.model import Decoder


class ValueHead(nn.Module):
    """A critic: one number for each hidden state, 0 before any training. It is float32 whatever the model is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, states: Tensor) -> Tensor:
        """float32 [P] for ``states`` [P, d]."""
        values: Tensor = states.float() @ self.weight + self.bias
        return values


class Network:
    """A policy, and the critic that reads the same hidden states where there is one."""

    def __init__(self, model: Decoder, critic: ValueHead | None) -> None:
        self.model = model
        self.critic = critic

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the model under their own names."""
        yield from self.model.named_parameters()
        if self.critic is not None:
            yield from self.critic.named_parameters(prefix="critic")

    def frozen(self) -> Network:
        """A copy that no step changes."""
        untrained = {id(p): p for _, p in self.named_parameters() if not p.requires_grad}
        copied = copy.deepcopy(self, untrained)
        for _, parameter in copied.named_parameters():
            parameter.requires_grad_(False)
        return copied

    @torch.no_grad()
    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        """Set these of the parameters."""
        own = dict(self.named_parameters())
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


class Parameters:
    """``masters``: name → float32 parameter, of what is trained; ``network``: its model computes in ``dtype``;
    ``low_bit``: name of a parameter → the parts that the model computes with instead, by full name."""

    def __init__(self, network: Network, *, dtype: torch.dtype, scheme: Quantization | None = None) -> None:
        """``network``: float32; its model is cast in place. EngineError when ``scheme`` covers other than layers."""
        self.network = network
        self.low_bit: Mapping[str, Mapping[str, Array]] = {}
        self._scheme = scheme
        self.masters: dict[str, nn.Parameter] = _trained(network.named_parameters())
        self._copies: dict[str, nn.Parameter] = {}
        if dtype != torch.float32:
            self._copies = _trained(network.model.named_parameters())
            self.masters |= {name: nn.Parameter(p.detach().clone()) for name, p in self._copies.items()}
            network.model.to(dtype)
        self._quantize()

    def collect(self) -> None:
        """Move what a backward pass left on the model to the masters' gradients."""
        for name, parameter in self._copies.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            master = self.masters[name]
            if master.grad is None:
                master.grad = gradient.float()
            else:
                master.grad += gradient

    def gradients(self) -> list[Tensor]:
        """The masters' gradients; zeros where no backward pass has reached."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self.masters.values() if master.grad is not None]

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in (*self.masters.values(), *self._copies.values()):
            parameter.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Give the model the masters' values."""
        for name, parameter in self._copies.items():
            parameter.copy_(self.masters[name])
        self._quantize()

    def _quantize(self) -> None:
        if self._scheme is not None:
            self.low_bit = quantize_model(self.network.model, self._scheme)

    def state_of(self, network: Network) -> dict[str, Tensor]:
        """What :meth:`frozen` makes such a network of."""
        return {name: parameter for name, parameter in network.named_parameters() if name in self.masters}

    def require_fit(self, tensors: Mapping[str, Tensor]) -> None:
        """ValueError unless these are tensors for :meth:`assign`."""
        require_shapes(tensors, {name: master.shape for name, master in self.masters.items()})

    @torch.no_grad()
    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the masters, and the model with them."""
        for name, master in self.masters.items():
            master.copy_(tensors[name])
        self.refresh()

    def frozen(self, tensors: Mapping[str, Tensor]) -> Network:
        """A network that no step changes, with these parameters."""
        network = self.network.frozen()
        network.assign(tensors)
        if self._scheme is not None:
            quantize_model(network.model, self._scheme)
        return network


class ModelWeights(WeightSource):
    """What the model computes with: its parameters as numpy views, in its dtype, or the low-bit parts of them."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """See :class:`WeightSource`; on a GPU the arrays are copies."""
        for name, parameter in self._parameters.network.model.named_parameters():
            if name in self._parameters.low_bit:
                yield from self._parameters.low_bit[name].items()
            else:
                yield name, as_numpy(parameter.detach().cpu())


def _trained(parameters: Iterator[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in parameters if parameter.requires_grad}


def require_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    """ValueError unless these are the expected tensors."""
    for name in sorted(expected.keys() ^ tensors.keys()):
        raise ValueError(f"{name} is {'missing' if name in expected else 'unknown'}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, expected {tuple(shape)}")
