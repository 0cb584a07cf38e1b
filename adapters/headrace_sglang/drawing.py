"""Tokens out of distributions, by seed and position: numbers alone, without SGLang."""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIXERS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
_LAST_SHIFT = 31
_BITS = 53


def draw(logprobs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 [N]: by inversion of the distribution function; ``logprobs``: float [N, V]; ``seeds``: int64 [N]."""
    reached = logprobs.double().exp().cumsum(dim=-1)
    wanted = uniform(seeds, positions).unsqueeze(-1) * reached[:, -1:]
    return torch.searchsorted(reached, wanted, right=True).squeeze(-1).clamp(max=logprobs.shape[-1] - 1)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64 [N] in [0, 1): of seed and position alone, by the finaliser of SplitMix64 (Steele, Lea and Flood 2014,
    doi 10.1145/2714064.2660195), once for each of the two."""
    mixed = _mix(_mix(seeds.long()) + positions.long())
    return _shifted(mixed, 64 - _BITS).double() / (1 << _BITS)


def _mix(state: torch.Tensor) -> torch.Tensor:
    state = state + _GOLDEN
    for shift, factor in _MIXERS:
        state = (state ^ _shifted(state, shift)) * factor
    return state ^ _shifted(state, _LAST_SHIFT)


def _shifted(state: torch.Tensor, count: int) -> torch.Tensor:
    """To the right, as an unsigned number."""
    return (state >> count) & ((1 << (64 - count)) - 1)
