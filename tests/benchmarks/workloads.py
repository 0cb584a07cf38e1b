"""What the data plane's benchmark moves, and the limit that memory sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from bare_store import Array
from timing import rate

from headrace.contract import Column, Ragged
from headrace.dataplane import ColumnSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``columns``: of one put. ``schema``: theirs. ``repeat``: puts measured per round."""

    name: str
    columns: Mapping[str, Column]
    schema: Mapping[str, ColumnSchema]
    repeat: int
    megabytes: bool

    @property
    def rows(self) -> int:
        """Of a put."""
        return len(next(iter(self.columns.values())))

    @property
    def amount(self) -> float:
        """Rows of a put, or its megabytes."""
        values = [column.values if isinstance(column, Ragged) else column for column in self.columns.values()]
        return sum(array.nbytes for array in values) / 1e6 if self.megabytes else self.rows

    @property
    def arrays(self) -> dict[str, Array]:
        """The same bytes as plain arrays, which the bare store takes."""
        plain: dict[str, Array] = {}
        for name, column in self.columns.items():
            if isinstance(column, Ragged):
                plain |= {name: column.values, f"{name}_offsets": column.offsets}
            else:
                plain[name] = column
        return plain


def workloads() -> list[Workload]:
    """What ``--only`` chooses from."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(7, 1, 256).clip(8, 16384).astype(int).tolist()
    small = {"payload": ColumnSchema("int64", (16,)), "reward": ColumnSchema("float32")}
    text = {"tokens": ColumnSchema("int32", ragged=True), "logprobs": ColumnSchema("float32", ragged=True)}

    def rows(count: int) -> dict[str, Column]:
        return {"payload": np.ones((count, 16), np.int64), "reward": np.ones(count, np.float32)}

    def ragged(lengths: list[int]) -> dict[str, Column]:
        tokens = Ragged.from_arrays([np.arange(length, dtype=np.int32) for length in lengths])
        return {"tokens": tokens, "logprobs": tokens.like(tokens.values.astype(np.float32))}

    image = {"image": ColumnSchema("uint8", (1 << 20,))}
    return [
        Workload(name="single", columns=rows(1), schema=small, repeat=300, megabytes=False),
        Workload(name="batch", columns=rows(64), schema=small, repeat=100, megabytes=False),
        Workload(name="ragged", columns=ragged(lengths), schema=text, repeat=10, megabytes=True),
        Workload(name="text", columns=ragged([2048] * 1024), schema=text, repeat=5, megabytes=True),
        Workload(
            name="megabyte",
            columns={"image": np.ones((128, 1 << 20), np.uint8)},
            schema=image,
            repeat=2,
            megabytes=True,
        ),
    ]


def waiting() -> Workload:
    """What a consumer waits for."""
    return replace(workloads()[0], name="latency", repeat=100)


def memcpy_rate() -> float:
    """MB a second of one copy of 128 MB into memory that is there."""
    source, target = np.ones((128, 1 << 20), np.uint8), np.ones((128, 1 << 20), np.uint8)
    return rate(source.nbytes / 1e6, 5, lambda: np.copyto(target, source))
