"""``metrics.jsonl`` (one record per trained batch) and ``evaluation.jsonl`` (one per evaluation and mode).

A record of metrics is flat: ``time`` (unix seconds), ``phase``, ``version`` (the version the batch was trained at),
``step`` (batch of the phase, from 0), then one number per metric name. A number that is not finite is written as null
and read as NaN. Both files are written with :class:`headrace.observe.lines.RecordLog`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.observe.lines import LineReader

METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "evaluation.jsonl"


class MetricsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``metrics.jsonl``."""

    time: float
    phase: str
    version: int
    step: int
    values: dict[str, float]
    """By metric name."""


class EvaluationSample(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out answer."""

    prompt: str
    answer: str
    reward: float | None


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``evaluation.jsonl``: answers of one version in one mode."""

    version: int
    mode: str
    """``greedy`` or ``sampled``."""
    samples: list[EvaluationSample]


_OWN = frozenset({"time", "phase", "version", "step"})


def _metrics(line: bytes) -> MetricsRecord:
    raw = msgspec.json.decode(line, type=dict[str, int | float | str | None])
    own = {name: value for name, value in raw.items() if name in _OWN}
    values = {
        name: float("nan") if value is None else value
        for name, value in raw.items()
        if name not in _OWN and not isinstance(value, str)
    }
    return msgspec.convert({**own, "values": values}, MetricsRecord)


def read_metrics(path: str | Path) -> LineReader[MetricsRecord]:
    """The records of a metrics file, or of a run directory. RunError when it is absent or not such a file."""
    path = Path(path)
    return LineReader(path / METRICS_FILE if path.is_dir() else path, _metrics)


def read_evaluations(path: str | Path) -> LineReader[EvaluationRecord]:
    """The records of an evaluation file, or of a run directory. RunError when it is absent or not such a file."""
    path = Path(path)
    decoder = msgspec.json.Decoder(EvaluationRecord)
    return LineReader(path / EVALUATION_FILE if path.is_dir() else path, decoder.decode)
