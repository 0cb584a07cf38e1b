"""A number that knows how to be combined: every metric declares its reduction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["mean", "sum", "min", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """``mean``: ``total / count``; ``sum``: ``total``; ``min`` / ``max``: extreme of the ``total`` values."""

    total: float
    count: float = 1.0
    reduction: Reduction = "mean"

    @property
    def value(self) -> float:
        """NaN for a mean over nothing."""
        if self.reduction != "mean":
            return self.total
        return self.total / self.count if self.count else float("nan")

    def merge(self, other: Metric) -> Metric:
        """The metric over both. ValueError when the reductions differ."""
        if self.reduction != other.reduction:
            raise ValueError(f"cannot merge a {self.reduction} metric with a {other.reduction} one")
        if self.reduction in ("min", "max"):
            total = (min if self.reduction == "min" else max)(self.total, other.total)
        else:
            total = self.total + other.total
        return Metric(
            total=total,
            count=self.count + other.count,
            reduction=self.reduction,
        )


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge by name; a name absent from some parts is merged over the others."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged
