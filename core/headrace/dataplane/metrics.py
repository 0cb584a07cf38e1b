"""What a ledger and its storage units are doing, as Prometheus metrics; read off when somebody asks, kept nowhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import Any

import numpy as np

from headrace.dataplane.ledger import LedgerService
from headrace.dataplane.messages import UnitFigures
from headrace.dataplane.partition import PartitionLedger
from headrace.wire import Server
from headrace.wire.latency import Latency

_STALEST = 16
"""Groups that are staler are counted as one kind."""
LEDGER = "ledger"
"""In the place of a unit's address."""

_Rows = Iterable[tuple[Sequence[str], float]]


async def data_plane_metrics(ledger: LedgerService, server: Server) -> list[Any]:
    """Metric families. O(rows) in numpy, at most. ``server``: of the ledger."""
    units = await ledger.unit_figures()
    partitions, now = list(ledger.partitions), monotonic()
    return [*_of_partitions(partitions, now), *_of_units(units), *_of_server(server, units)]


def _of_partitions(partitions: Sequence[PartitionLedger], now: float) -> Iterable[Any]:
    by_partition, by_consumer = ("partition",), ("partition", "consumer")
    yield _gauge(
        "rows",
        "Rows stored and not yet done with.",
        by_partition,
        (((p.spec.name,), p.ledger.buffered) for p in partitions),
    )
    yield _gauge(
        "row_bytes", "Bytes of those rows.", by_partition, (((p.spec.name,), p.ledger.nbytes) for p in partitions)
    )
    yield _gauge(
        "leases", "Leases that are out.", by_partition, (((p.spec.name,), len(p.ledger.leases)) for p in partitions)
    )
    yield _gauge(
        "oldest_group_age_seconds",
        "Since the oldest group was opened that is still there.",
        by_partition,
        (((p.spec.name,), p.ages.oldest(now)) for p in partitions),
    )
    yield _gauge(
        "group_staleness",
        "Groups stored, by how many policy versions they are behind the newest of them.",
        ("partition", "versions"),
        (row for p in partitions for row in _staleness(p)),
    )
    yield _gauge(
        "ready_groups",
        "Groups that a consumer could lease, or rows, where it works by row.",
        by_consumer,
        (((p.spec.name, c), _ready(p, c)) for p in partitions for c in p.spec.consumers),
    )
    yield _gauge(
        "ready_rows",
        "Rows that a consumer could lease.",
        by_consumer,
        (
            ((p.spec.name, c), _ready(p, c) * (1 if c in p.spec.by_row else p.spec.group_size))
            for p in partitions
            for c in p.spec.consumers
        ),
    )
    yield _gauge(
        "waiting_calls",
        "Calls for rows that are not ready yet.",
        by_consumer,
        (((p.spec.name, c), p.waiting_calls(c)) for p in partitions for c in p.spec.consumers),
    )
    yield _gauge(
        "longest_wait_seconds",
        "For how long the first of them has waited.",
        by_consumer,
        (((p.spec.name, c), p.longest_wait(c, now)) for p in partitions for c in p.spec.consumers),
    )


def _ready(partition: PartitionLedger, consumer: str) -> int:
    return sum(partition.ledger.ready(consumer).values())


def _staleness(partition: PartitionLedger) -> _Rows:
    versions = partition.ledger.stored_versions()
    if len(versions):
        behind, groups = np.unique(np.minimum(versions.max() - versions, _STALEST), return_counts=True)
        for age, count in zip(behind.tolist(), groups.tolist(), strict=True):
            yield (partition.spec.name, f"{age}" if age < _STALEST else f"{age}+"), count


def _of_units(units: Mapping[str, UnitFigures | None]) -> Iterable[Any]:
    there = {unit: figures for unit, figures in units.items() if figures is not None}
    yield _gauge("unit_up", "Whether a storage unit answers.", ("unit",), (((u,), u in there) for u in units))
    for name, figure, what in (
        ("rows", "rows", "Rows that a storage unit keeps."),
        ("bytes", "nbytes", "Bytes that a storage unit keeps."),
        ("capacity_bytes", "capacity", "Above which its producers wait; 0 for no bound."),
        ("waiting_puts", "waiting", "Puts that wait for room."),
        ("waiting_bytes", "waiting_bytes", "Bytes of those puts."),
    ):
        yield _gauge(f"unit_{name}", what, ("unit",), (((u,), getattr(f, figure)) for u, f in there.items()))
    yield _moved(there)


def _moved(units: Mapping[str, UnitFigures]) -> Any:
    from prometheus_client.core import CounterMetricFamily

    counter = CounterMetricFamily(
        "headrace_column_bytes",
        "Bytes of a column that producers put, and that were sent to consumers or mapped by them.",
        labels=("unit", "partition", "column", "hop"),
    )
    for unit, figures in units.items():
        for hop, partition, column, nbytes in figures.traffic:
            counter.add_metric((unit, partition, column, hop), nbytes)
    return counter


def _of_server(server: Server, units: Mapping[str, UnitFigures | None]) -> Iterable[Any]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    refused: dict[str, Mapping[str, int]] = {LEDGER: server.refused}
    refused |= {unit: figures.refused for unit, figures in units.items() if figures is not None}
    counter = CounterMetricFamily(
        "headrace_refused_messages", "Messages and peers turned away.", labels=("node", "reason")
    )
    for node, reasons in refused.items():
        for reason, count in reasons.items():
            counter.add_metric((node, reason), count)
    yield counter
    histogram = HistogramMetricFamily(
        "headrace_call_seconds", "Calls answered by the ledger, with their waits.", labels=("method",)
    )
    for method, latency in server.latencies.items():
        histogram.add_metric((method,), _buckets(latency), latency.total)
    yield histogram


def _buckets(latency: Latency) -> list[tuple[str, float]]:
    return [("+Inf" if below == float("inf") else f"{below:g}", count) for below, count in latency.up_to()]


def _gauge(name: str, what: str, labels: Sequence[str], rows: _Rows) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    gauge = GaugeMetricFamily(f"headrace_{name}", what, labels=labels)
    for values, number in rows:
        gauge.add_metric(values, number)
    return gauge
