"""A training engine for bigram models: exact gradients by hand, momentum, exact save and load, no tensor library.

Invariant: sums are accumulated in float64 and divided once, so the split into micro-batches changes nothing that
float32 weights can show.
"""

from __future__ import annotations

import json
import math
import pkgutil
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.contract import (
    CURRENT,
    Array,
    Batch,
    ForwardOutput,
    LossInputs,
    LossOutput,
    LossSpec,
    Metric,
    Ragged,
    SaveKind,
    ScratchModels,
    Snapshots,
    StepResult,
    TinyModels,
    TrainingCapabilities,
    TrainingContext,
    TrainingEngine,
    TrainingStep,
    WeightSource,
    merge_metrics,
)
from headrace.contract.columns import LOSS_MASK, LOSS_WEIGHTS, TOKENS
from headrace.errors import ConfigError, EngineError, RunError
from headrace.testing.bigram import BIAS, CONFIG, CRITIC, WEIGHT, WEIGHTS, Bigram, load_bigram, random_bigram
from headrace.testing.pertoken import PerToken
from headrace.testing.tensors import read_tensors, write_tensors
from headrace.testing.trouble import FakeSettings, Trouble

MOMENTUM = 0.9
SCRATCH = {"vocabulary": 16, "max_length": 256}
"""Keys of ``[model.scratch]`` with their defaults."""
STATE, NOTES = "state.safetensors", "training.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeTrainingSettings(FakeSettings):
    """A piece of work is an optimiser step."""

    learning_rate: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Trainable:
    """The trainable tokens of a batch, int64 [T] each. ``places``: in the flat ``tokens`` column."""

    places: Array
    rows: Array
    targets: Array
    previous: Array

    @classmethod
    def of(cls, batch: Batch) -> _Trainable:
        tokens = batch.ragged(TOKENS)
        places = np.flatnonzero(batch.ragged(LOSS_MASK).values)
        return cls(
            places=places,
            rows=np.searchsorted(tokens.offsets, places, side="right") - 1,
            targets=tokens.values[places],
            previous=tokens.values[places - 1],
        )


class FakeTrainingEngine(TrainingEngine, Snapshots, ScratchModels, TinyModels):
    """Stochastic gradient descent with momentum."""

    Settings = FakeTrainingSettings

    def __init__(self, settings: FakeTrainingSettings) -> None:
        super().__init__(settings)
        self.learning_rate = settings.learning_rate
        self.trouble = Trouble(settings, error=EngineError)
        self.velocity: dict[str, Array] = {}
        self._model: Bigram | None = None
        self._snapshots: dict[str, Bigram] = {}
        self._path = ""

    @classmethod
    def capabilities(cls, settings: Any) -> TrainingCapabilities:
        return TrainingCapabilities(snapshots=True, scratch=True, values=True)

    @classmethod
    def create_model(cls, path: str, *, settings: Mapping[str, Any], seed: int) -> None:
        unknown = sorted(set(settings) - set(SCRATCH))
        if unknown:
            raise ConfigError(f"unknown settings {unknown}; known: {sorted(SCRATCH)}", fix="remove them")
        random_bigram(**{**SCRATCH, **settings}, seed=seed).save(path)

    @classmethod
    def write_tiny_model(cls, path: str) -> None:
        random_bigram(vocabulary=16, max_length=256, seed=0).save(path)

    def start(self, context: TrainingContext) -> None:
        self._model = load_bigram(context.model_path)
        if context.values:
            self._model = self._model.with_critic()
        self._path = context.model_path
        self.velocity = {name: np.zeros_like(tensor) for name, tensor in self._model.tensors.items()}

    @property
    def model(self) -> Bigram:
        """The weights being trained."""
        if self._model is None:
            raise EngineError("the engine is not started, or closed", fix="start it first")
        return self._model

    @property
    def policy(self) -> Bigram:
        """The same weights without a critic: what is published and exported."""
        return self.model.with_tensors({name: self.model.tensors[name] for name in (WEIGHT, BIAS)})

    def forward(
        self,
        batch: Batch,
        *,
        outputs: tuple[ForwardOutput, ...] = ("logprobs",),
        weights: str = CURRENT,
        temperature: float = 1.0,
    ) -> Mapping[str, Ragged]:
        model = self.model if weights == CURRENT else self._snapshots[weights]
        trainable = _Trainable.of(batch)
        table = model.logprobs(trainable.previous, temperature=temperature)
        found = {
            "logprobs": table[np.arange(len(table)), trainable.targets],
            "entropy": -(np.exp(table) * table).sum(axis=-1),
        }
        if "values" in outputs:
            found["values"] = model.values(trainable.previous)
        return {name: self._aligned(batch, trainable, found[name]) for name in outputs}

    def _aligned(self, batch: Batch, trainable: _Trainable, values: Array) -> Ragged:
        tokens = batch.ragged(TOKENS)
        column = np.zeros(len(tokens.values), dtype=np.float32)
        column[trainable.places] = values
        return tokens.like(column)

    def begin_step(self, loss: LossSpec) -> TrainingStep:
        return FakeTrainingStep(self, loss)

    def weight_source(self) -> WeightSource:
        return FakeWeightSource(self.policy.tensors)

    def snapshot(self, name: str) -> None:
        self._snapshots[name] = self.model.with_tensors({n: t.copy() for n, t in self.model.tensors.items()})

    def drop_snapshot(self, name: str) -> None:
        self._snapshots.pop(name, None)

    def close(self) -> None:
        self._model = None
        self._snapshots.clear()

    # ------------------------------------------------------------ save and load

    def save(self, path: str, *, kind: SaveKind) -> None:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        if kind == "export":
            for file in Path(self._path).iterdir():
                if file.name not in (CONFIG, WEIGHTS):
                    shutil.copy(file, folder)
            self.policy.save(path)
        else:
            write_tensors(folder / STATE, self._state())
            (folder / NOTES).write_text(json.dumps({"format": 1, "snapshots": sorted(self._snapshots)}))

    def load(self, path: str) -> None:
        folder = Path(path)
        absent = [name for name in (STATE, NOTES) if not (folder / name).is_file()]
        if absent:
            raise RunError(f"{path} lacks {', '.join(absent)}", fix="load another save")
        names, state = json.loads((folder / NOTES).read_text())["snapshots"], read_tensors(folder)
        parts = [_part(state, prefix) for prefix in ("weights", "velocity", *(f"snapshot/{name}" for name in names))]
        shapes = _shapes(self.model.tensors)
        if any(_shapes(part) != shapes for part in parts):
            raise RunError(f"{path} is the save of another model than {shapes}", fix="load a save of this model")
        weights, self.velocity, *snapshots = parts
        self._snapshots = {n: self.model.with_tensors(t) for n, t in zip(names, snapshots, strict=True)}
        self._model = self.model.with_tensors(weights)

    def _state(self) -> dict[str, Array]:
        kept = {"weights": self.model.tensors, "velocity": self.velocity}
        kept |= {f"snapshot/{name}": model.tensors for name, model in self._snapshots.items()}
        return {f"{prefix}/{name}": tensor for prefix, tensors in kept.items() for name, tensor in tensors.items()}


class FakeWeightSource(WeightSource):
    """Views of the weights, in the order of their names."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self._tensors = tensors

    def tensors(self) -> Iterator[tuple[str, Array]]:
        yield from sorted(self._tensors.items())


class FakeTrainingStep(TrainingStep):
    """Sums in float64."""

    def __init__(self, engine: FakeTrainingEngine, spec: LossSpec) -> None:
        self._engine = engine
        self._spec = spec
        self._loss: Callable[..., LossOutput] = pkgutil.resolve_name(spec.function)
        self.numerator = 0.0
        self.gradient = {name: np.zeros(t.shape) for name, t in engine.model.tensors.items()}
        self._metrics: list[dict[str, Metric]] = []

    def accumulate(self, batch: Batch) -> None:
        trainable = _Trainable.of(batch)
        if not len(trainable.places):
            return
        table = self._engine.model.logprobs(trainable.previous, temperature=self._spec.temperature)
        output = self._loss(self._inputs(batch, trainable, table), **self._spec.settings)
        gradient = output.numerator.gradient
        if self._spec.values:
            gradient, by_values = gradient
            np.add.at(self.gradient[CRITIC], trainable.previous, by_values)
        slope = -np.exp(table)
        slope[np.arange(len(table)), trainable.targets] += 1.0
        slope *= gradient[:, None] / self._spec.temperature
        np.add.at(self.gradient[WEIGHT], trainable.previous, slope)
        self.gradient[BIAS] += slope.sum(axis=0)
        self.numerator += float(output.numerator)
        self._metrics.append(
            {n: Metric(total=float(t), count=float(c), reduction=r) for n, (t, c, r) in output.metrics.items()}
        )

    def _inputs(self, batch: Batch, trainable: _Trainable, table: Array) -> LossInputs:
        def column(name: str) -> Array:
            found = batch.columns[name]
            values: Array = found.values[trainable.places] if isinstance(found, Ragged) else found
            return values

        of_targets = table[np.arange(len(table)), trainable.targets]
        logprobs = PerToken.of(of_targets)
        values: PerToken | None = None
        if self._spec.values:
            logprobs, values = PerToken.pair(of_targets, self._engine.model.values(trainable.previous))
        return LossInputs(
            logprobs=logprobs,
            values=values,
            weights=column(LOSS_WEIGHTS),
            sequence=trainable.rows,
            sequences=len(batch),
            columns={name: column(name) for name in self._spec.columns},
            entropy=-(np.exp(table) * table).sum(axis=-1) if self._spec.entropy else None,
        )

    def finish(self, *, denominator: float) -> StepResult:
        engine = self._engine
        engine.trouble.work("an optimiser step")
        loss = norm = 0.0
        applied = denominator > 0
        if applied:
            loss = self.numerator / denominator
            norm = math.sqrt(sum(float((g**2).sum()) for g in self.gradient.values())) / denominator
            applied = math.isfinite(loss) and math.isfinite(norm)
        if applied:
            self._apply(denominator)
        return StepResult(
            applied=applied,
            loss=loss,
            gradient_norm=norm,
            learning_rate=engine.learning_rate,
            metrics=merge_metrics(self._metrics),
        )

    def _apply(self, denominator: float) -> None:
        for name, weight in self._engine.model.tensors.items():
            velocity = self._engine.velocity[name]
            velocity *= MOMENTUM
            velocity += (self.gradient[name] / denominator).astype(np.float32)
            weight -= np.float32(self._engine.learning_rate) * velocity

    def discard(self) -> None:
        self.numerator = 0.0
        self._metrics.clear()
        for gradient in self.gradient.values():
            gradient[:] = 0.0


def _part(state: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(f"{prefix}/"): t for name, t in state.items() if name.startswith(f"{prefix}/")}


def _shapes(tensors: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in sorted(tensors.items())}
