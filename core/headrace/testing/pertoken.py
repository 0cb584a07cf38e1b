"""Per-token numbers that know their slope: a loss written with operators has a gradient without a tensor library.

A value of token ``t`` depends on the log-prob of token ``t`` alone, and on the critic's value of it where there is one,
so one slope per token, or one for each of the two, is the whole derivative.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from headrace.contract import Array

Operand: TypeAlias = "PerToken | Array | float"


class PerToken:
    """``values``: float64 [T]; ``slopes``: float64 [T], or [2, T] by log-probs and by values. Knows ``+ - *``, ``exp``,
    ``clip``, ``sum``, ``detach`` and ``len``."""

    __array_ufunc__ = None  # an array to the left of an operator leaves it to this class

    def __init__(self, values: Array, slopes: Array) -> None:
        self.values = values
        self.slopes = slopes

    @classmethod
    def of(cls, logprobs: Array) -> PerToken:
        """The log-probs themselves: slope 1."""
        return cls(logprobs.astype(np.float64), np.ones(len(logprobs)))

    @classmethod
    def pair(cls, logprobs: Array, values: Array) -> tuple[PerToken, PerToken]:
        """Log-probs and values: each has slope 1 by itself and 0 by the other."""
        one, none = np.ones(len(logprobs)), np.zeros(len(logprobs))
        return (
            cls(logprobs.astype(np.float64), np.stack([one, none])),
            cls(values.astype(np.float64), np.stack([none, one])),
        )

    def __len__(self) -> int:
        return len(self.values)

    def __neg__(self) -> PerToken:
        return PerToken(-self.values, -self.slopes)

    def __add__(self, other: Operand) -> PerToken:
        values, slopes = _parts(other)
        return PerToken(self.values + values, self.slopes + slopes)

    def __sub__(self, other: Operand) -> PerToken:
        values, slopes = _parts(other)
        return PerToken(self.values - values, self.slopes - slopes)

    def __rsub__(self, other: Operand) -> PerToken:
        return -self + other

    def __mul__(self, other: Operand) -> PerToken:
        values, slopes = _parts(other)
        return PerToken(self.values * values, self.slopes * values + self.values * slopes)

    __radd__ = __add__
    __rmul__ = __mul__

    def exp(self) -> PerToken:
        """e to each value."""
        values = np.exp(self.values)
        return PerToken(values, values * self.slopes)

    def clip(self, low: float, high: float) -> PerToken:
        """Values within bounds; one at or beyond a bound has slope 0."""
        inside = (self.values > low) & (self.values < high)
        return PerToken(self.values.clip(low, high), np.where(inside, self.slopes, 0.0))

    def detach(self) -> Array:
        """The values, without slope."""
        return self.values

    def sum(self) -> Total:
        """A numerator."""
        return Total(float(self.values.sum()), self.slopes)


class Total:
    """A sum over tokens. ``gradient``: its derivative, shaped as the slopes of what was summed."""

    def __init__(self, value: float, gradient: Array) -> None:
        self.value = value
        self.gradient = gradient

    def __float__(self) -> float:
        return self.value

    def __neg__(self) -> Total:
        return Total(-self.value, -self.gradient)

    def __add__(self, other: Total) -> Total:
        return Total(self.value + other.value, self.gradient + other.gradient)

    def __mul__(self, factor: float) -> Total:
        return Total(self.value * factor, self.gradient * factor)

    __rmul__ = __mul__


def _parts(operand: Operand) -> tuple[Any, Any]:
    return (operand.values, operand.slopes) if isinstance(operand, PerToken) else (operand, 0.0)
