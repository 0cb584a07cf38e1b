"""One plugin per role that declares what a job's checks ask for and does nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from headrace.contract import (
    Algorithm,
    AlgorithmNeeds,
    Demonstrations,
    Environment,
    InferenceCapabilities,
    InferenceEngine,
    Launcher,
    LossSpec,
    MultiVersion,
    ScratchModels,
    Snapshots,
    StalenessPolicy,
    Storage,
    TrainingCapabilities,
    TrainingEngine,
    WeightTransport,
)
from headrace.errors import StalenessError
from headrace.hooks import Observer


def concrete(cls: type) -> type:
    """``cls`` with every abstract method closed by one that raises: declarations are all that is under test."""

    def unused(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{cls.__name__} only declares")

    for name in getattr(cls, "__abstractmethods__", ()):
        setattr(cls, name, unused)
    cls.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]  # ABCMeta's own attribute
    return cls


@concrete
class Sums(Environment, Demonstrations):
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        largest: int
        operator: Literal["plus", "minus"] = "plus"


@concrete
class Riddles(Environment):
    """Has no demonstrations."""


@concrete
class Nervous(Environment):
    """Raises where it should look whether it can start."""

    @classmethod
    def preflight(cls, settings: Any, *, directory: str, origin: Callable[[str], str]) -> None:
        raise KeyError("tokenizer")


@concrete
class Engine(InferenceEngine, MultiVersion):
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        slots: int = 8

    @classmethod
    def capabilities(cls, settings: Any) -> InferenceCapabilities:
        return InferenceCapabilities(live_versions=4, deterministic=True)


@concrete
class Couple(Engine):
    """Of which a job has two at most."""

    @classmethod
    def capabilities(cls, settings: Any) -> InferenceCapabilities:
        return InferenceCapabilities(instances=2)


@concrete
class Boaster(InferenceEngine):
    """Declares several versions and is not MultiVersion."""

    @classmethod
    def capabilities(cls, settings: Any) -> InferenceCapabilities:
        return InferenceCapabilities(live_versions=4)


@concrete
class Trainer(TrainingEngine, ScratchModels, Snapshots):
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        learning_rate: float
        betas: tuple[float, float] = (0.9, 0.99)

    @classmethod
    def capabilities(cls, settings: Any) -> TrainingCapabilities:
        return TrainingCapabilities(snapshots=True, scratch=True)


@concrete
class PlainTrainer(TrainingEngine):
    """Has no capability."""

    @dataclass(frozen=True, kw_only=True)
    class Settings:
        learning_rate: float = 0.1


@concrete
class Relative(Algorithm):
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        clip: float = 0.2
        reference_weight: float = 0.0

        def __post_init__(self) -> None:
            if self.clip <= 0:
                raise ValueError(f"clip must be above 0, it is {self.clip:g}")

    @classmethod
    def needs(cls, settings: Any) -> AlgorithmNeeds:
        return AlgorithmNeeds(min_group_size=2, reference_logprobs=settings.reference_weight > 0)

    def loss(self, *, temperature: float) -> LossSpec:
        return LossSpec(function="nowhere:loss")


@concrete
class Alone(Algorithm):
    """Compares nobody with anybody."""

    @classmethod
    def needs(cls, settings: Any) -> AlgorithmNeeds:
        return AlgorithmNeeds()

    def loss(self, *, temperature: float) -> LossSpec:
        return LossSpec(function="nowhere:loss")


@concrete
class Imitation(Algorithm):
    @classmethod
    def needs(cls, settings: Any) -> AlgorithmNeeds:
        return AlgorithmNeeds(rollout=False, behaviour_logprobs=False)


@concrete
class Careless(Algorithm):
    """Raises where it should declare."""

    @classmethod
    def needs(cls, settings: Any) -> AlgorithmNeeds:
        raise KeyError("clip")


@concrete
class Bounded(StalenessPolicy):
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        max_staleness: int

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.max_staleness = settings.max_staleness

    def check(self, *, batch_groups: int) -> None:
        if self.settings.max_staleness > batch_groups:
            raise StalenessError(f"max_staleness {self.settings.max_staleness} > batch_groups {batch_groups}")


@concrete
class Dictionary(Storage):
    pass


@concrete
class Transport(WeightTransport):
    pass


@concrete
class Starter(Launcher):
    pass


class Diary(Observer):
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        pages: int = 1


class Clashing(Observer):
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        use: str = ""
