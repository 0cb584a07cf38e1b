"""Ragged columns and batches: how rows look on every role boundary.

A *row* is one token sequence of a trajectory. A *column* is one property of every row: dense (one
value per row) or ragged (one array per row, concatenated without padding). Token-aligned columns
all follow one convention: entry ``t`` is about token ``t`` itself, so a log-probability at ``t`` is
that of ``tokens[t]`` given ``tokens[:t]``; position 0 is never trained.

What many rows have in common and is large, such as the image of a prompt, is a :class:`Repeated` column: each value
once, and which of them each row has.

Invariant: :meth:`Batch.take` and :meth:`Batch.concatenate` are the only ways to reorder rows, and
they move every column together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

TOKENS = "tokens"
"""Ragged int32: prompt and response token ids."""
LOSS_MASK = "loss_mask"
"""Ragged bool, aligned with ``tokens``: True where the policy sampled the token and it is trained."""
BEHAVIOUR_LOGPROBS = "behaviour_logprobs"
"""Ragged float32, nats, aligned with ``tokens``: from the rollout; 0 where ``loss_mask`` is False."""
PROXIMAL_LOGPROBS = "proximal_logprobs"
"""Ragged float32, nats: the trainer's own forward at the start of the training batch."""
REFERENCE_LOGPROBS = "reference_logprobs"
"""Ragged float32, nats: a frozen reference policy."""
VALUES = "values"
"""Ragged float32: what a critic expected before each token, of the tokens up to it: the trainer's own forward at the
start of the training batch."""
ADVANTAGES = "advantages"
"""Ragged float32, aligned with ``tokens``."""
LOSS_WEIGHTS = "loss_weights"
"""Ragged float32, aligned with ``tokens``: weight of each token's loss in the numerator sum."""
DENOMINATOR = "denominator"
"""Dense float64, at least 0: what the row adds to the one global denominator of its optimiser step. More than 0 for a
row that is trained with any loss weight: its mini-batch may hold no other, and a step over 0 is not taken."""
TRAINED = "trained"
"""Dense bool: False for rows that cannot contribute a gradient and need no forward pass."""
REWARD = "reward"
"""Dense float32: NaN when the row could not be scored."""
TURN_REWARDS = "turn_rewards"
"""Ragged float32, aligned with ``tokens``: what a turn earned, at its last sampled token; 0 elsewhere. Only where the
algorithm needs them."""
GREEDY = "greedy"
"""Dense bool: the answer was decoded greedily, for its reward alone. Only where the algorithm needs ``greedy_reward``,
and never among what it is given or what is trained."""
GREEDY_REWARD = "greedy_reward"
"""Dense float32: the reward of the greedy answer to the row's prompt; NaN when that could not be scored. Only where the
algorithm needs it."""
GROUP = "group"
"""Dense int64: the prompt's group id."""
VERSION = "version"
"""Dense int64: policy version of the row's oldest token."""
TOKEN_VERSIONS = "token_versions"
"""Ragged int32, aligned with ``tokens``: the policy version that sampled the token, -1 where none did. Only where the
staleness policy interrupts trajectories; elsewhere ``version`` is that of all."""
TRUNCATED = "truncated"
"""Dense bool: the response ended with ``length``."""
KNOWN = frozenset(
    {
        TOKENS,
        LOSS_MASK,
        BEHAVIOUR_LOGPROBS,
        PROXIMAL_LOGPROBS,
        REFERENCE_LOGPROBS,
        VALUES,
        ADVANTAGES,
        LOSS_WEIGHTS,
        DENOMINATOR,
        TRAINED,
        REWARD,
        TURN_REWARDS,
        GREEDY,
        GREEDY_REWARD,
        GROUP,
        VERSION,
        TOKEN_VERSIONS,
        TRUNCATED,
    }
)
"""All of the above. Others are between an algorithm and its loss, in the trainer's process."""


_SHORT = 32
"""Entries: rows that are no longer on average are copied entry by entry, others row by row, whichever is faster."""


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """One array per row, stored back to back. ``values``: [total, ...]; ``offsets``: int64 [n + 1]."""

    values: Array
    offsets: Array

    def __post_init__(self) -> None:
        offsets = self.offsets
        if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0 or offsets.dtype.kind != "i":
            raise ValueError(f"Ragged.offsets must be 1-D signed integers that start at 0, got {offsets!r}")
        # Of one row the two ends say all: small puts have nothing else to do.
        falls = len(offsets) > 2 and np.count_nonzero(offsets[1:] < offsets[:-1])
        if offsets[-1] != len(self.values) or falls:
            raise ValueError(f"Ragged.offsets must rise to len(values) = {len(self.values)}, got {offsets!r}")

    @classmethod
    def from_arrays(cls, arrays: Sequence[Array], *, dtype: npt.DTypeLike | None = None) -> Ragged:
        """Join per-row arrays; ``dtype`` is needed only when ``arrays`` is empty."""
        offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(a) for a in arrays], out=offsets[1:])
        values = np.concatenate(arrays) if len(arrays) else np.empty(0, dtype=dtype)
        return cls(values.astype(dtype, copy=False) if dtype is not None else values, offsets)

    @property
    def lengths(self) -> Array:
        """int64 [n]."""
        lengths: Array = self.offsets[1:] - self.offsets[:-1]
        return lengths

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a ragged column with {len(self)} rows")
        row %= len(self)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Array]:
        return (self[row] for row in range(len(self)))

    def take(self, indices: npt.ArrayLike) -> Ragged:
        """Rows at ``indices``, in that order (a copy)."""
        chosen = np.asarray(indices, dtype=np.int64)
        wrong = chosen[(chosen < -len(self)) | (chosen >= len(self))]
        if len(wrong):
            raise IndexError(f"row {wrong[0]} of a ragged column with {len(self)} rows")
        starts, lengths = self.offsets[:-1][chosen], self.lengths[chosen]
        offsets = np.zeros(len(chosen) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if offsets[-1] <= _SHORT * len(chosen):
            places = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
            return Ragged(self.values[places], offsets)
        rows = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        return Ragged(np.concatenate([self.values[start:stop] for start, stop in rows]), offsets)

    def like(self, values: Array) -> Ragged:
        """A column with the same row lengths and other ``values``."""
        return Ragged(values, self.offsets)


Column: TypeAlias = Array | Ragged


def take_rows(column: Column, indices: Array) -> Column:
    """Rows at ``indices``, in that order (a copy)."""
    return column.take(indices) if isinstance(column, Ragged) else column[indices]


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    """Values of which several rows have the same. ``values``: a row for each of them; ``places``: int64 [n], where in
    them each row's is."""

    values: Array | Ragged
    places: Array

    def __post_init__(self) -> None:
        places = self.places
        if places.ndim != 1 or places.dtype != np.int64:
            raise ValueError(f"Repeated.places must be int64 [n], got {places.dtype} {list(places.shape)}")
        if len(places) and not 0 <= places.min() <= places.max() < len(self.values):
            raise ValueError(f"Repeated.places must be from 0 to {len(self.values) - 1}, got {places!r}")

    def __len__(self) -> int:
        return len(self.places)

    def take(self, indices: npt.ArrayLike) -> Repeated:
        """Rows at ``indices``, in that order, with the values that they have (a copy)."""
        used, places = np.unique(self.places[np.asarray(indices, dtype=np.int64)], return_inverse=True)
        return Repeated(take_rows(self.values, used), places.astype(np.int64, copy=False))

    def column(self) -> Column:
        """A value for each row (a copy)."""
        return take_rows(self.values, self.places)


def join_repeated(parts: Sequence[Repeated]) -> Repeated:
    """All rows of columns of one kind, of which there is at least one, in order. Values of different parts are not
    compared."""
    starts = np.cumsum([0, *(len(part.values) for part in parts[:-1])])
    places = [part.places + start for part, start in zip(parts, starts.tolist(), strict=True)]
    return Repeated(join_columns([part.values for part in parts]), np.concatenate(places))


def join_columns(parts: Sequence[Column]) -> Column:
    """All rows of columns of one kind, of which there is at least one, in order."""
    ragged = [part for part in parts if isinstance(part, Ragged)]
    if not ragged:
        return np.concatenate([np.asarray(part) for part in parts])
    lengths = np.concatenate([part.lengths for part in ragged])
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Ragged(np.concatenate([part.values for part in ragged]), offsets)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Rows with their columns. ``rows``: int64 [n] row ids; every column has n entries, those of which rows share
    values too, which are in ``repeated``."""

    rows: Array
    columns: Mapping[str, Column]
    repeated: Mapping[str, Repeated] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.rows)
        for columns in (self.columns, self.repeated):
            for name, column in columns.items():
                if len(column) != count:
                    raise ValueError(f"column {name!r} has {len(column)} entries for {count} rows")

    def __len__(self) -> int:
        return len(self.rows)

    def ragged(self, name: str) -> Ragged:
        """The ragged column ``name``; KeyError when absent, TypeError when dense."""
        column = self._column(name)
        if not isinstance(column, Ragged):
            raise TypeError(f"column {name!r} is dense, a ragged one was expected")
        return column

    def dense(self, name: str) -> Array:
        """The dense column ``name``; KeyError when absent, TypeError when ragged."""
        column = self._column(name)
        if isinstance(column, Ragged):
            raise TypeError(f"column {name!r} is ragged, a dense one was expected")
        return column

    def _column(self, name: str) -> Column:
        try:
            return self.columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; this batch has {sorted(self.columns)}") from None

    def with_columns(self, columns: Mapping[str, Column]) -> Batch:
        """The same rows with ``columns`` added or replaced."""
        return Batch(rows=self.rows, columns={**self.columns, **columns}, repeated=self.repeated)

    def select(self, names: Sequence[str]) -> Batch:
        """The same rows with these columns only."""
        return Batch(
            rows=self.rows,
            columns={name: column for name, column in self.columns.items() if name in names},
            repeated={name: column for name, column in self.repeated.items() if name in names},
        )

    def take(self, indices: npt.ArrayLike) -> Batch:
        """Rows at ``indices`` in that order, every column with them."""
        chosen = np.asarray(indices, dtype=np.int64)
        return Batch(
            rows=self.rows[chosen],
            columns={name: take_rows(column, chosen) for name, column in self.columns.items()},
            repeated={name: column.take(chosen) for name, column in self.repeated.items()},
        )

    @classmethod
    def concatenate(cls, batches: Sequence[Batch]) -> Batch:
        """All rows of ``batches`` in order; the batches must have the same columns."""
        if not batches:
            raise ValueError("concatenate needs at least one batch")
        names = [(set(b.columns), set(b.repeated)) for b in batches]
        if any(others != names[0] for others in names):
            raise ValueError(f"batches differ in columns: {[sorted(plain | repeated) for plain, repeated in names]}")
        return cls(
            rows=np.concatenate([b.rows for b in batches]),
            columns={name: join_columns([b.columns[name] for b in batches]) for name in batches[0].columns},
            repeated={name: join_repeated([b.repeated[name] for b in batches]) for name in batches[0].repeated},
        )
