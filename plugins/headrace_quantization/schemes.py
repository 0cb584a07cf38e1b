"""The built-in schemes. Linear layers are low-bit; ``keep`` names modules that stay as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from headrace.contract import Array, LowBitFormat, Quantization
from headrace_quantization.absmax import quantize_blocks

KEPT = ("embed_tokens", "lm_head", "gate", "router")
"""Embedding and output head decide between tokens directly, a router between experts; norms are no matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeSettings:
    """Of every scheme."""

    keep: tuple[str, ...] = KEPT
    """Modules that stay in high precision, by any part of their dotted names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings(SchemeSettings):
    """Of schemes whose weights have a scale for every few inputs."""

    group: int = 32
    """Inputs that share a scale; torch's kernels know 32, 64, 128 and 256."""

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ValueError(f"group must be at least 1, got {self.group}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Settings(SchemeSettings):
    """Of ``fp8_e4m3``."""

    blocks: Literal["channel", "square"] = "channel"
    """What shares a scale: the weights of one output, or 128 x 128 of them."""


class AbsMax(Quantization):
    """What the schemes have in common."""

    Settings: ClassVar[type[Any]] = SchemeSettings

    def covers(self, name: str, *, shape: tuple[int, ...]) -> bool:
        """Matrices of modules that are not kept."""
        *modules, kind = name.split(".")
        return kind == "weight" and len(shape) == 2 and not set(modules) & set(self.settings.keep)

    def quantize(self, weight: Array) -> dict[str, Array]:
        """See :mod:`headrace_quantization.absmax`."""
        return quantize_blocks(weight, self.format)


class W8A8Int8(AbsMax):
    """int8 weights with a scale for each output, int8 inputs with one for each token: products of integers."""

    @property
    def format(self) -> LowBitFormat:
        return LowBitFormat(weights="int8", block=(1, 0), activations="int8")


class W4A16Int4(AbsMax):
    """int4 weights with a scale for each ``group`` of inputs; what they are multiplied by stays as it is."""

    Settings = GroupSettings

    @property
    def format(self) -> LowBitFormat:
        return LowBitFormat(weights="int4", block=(1, self.settings.group))


class W4A8(AbsMax):
    """The weights of ``w4a16_int4``, and int8 inputs with a scale for each token."""

    Settings = GroupSettings

    @property
    def format(self) -> LowBitFormat:
        return LowBitFormat(weights="int4", block=(1, self.settings.group), activations="int8")


class Fp8E4M3(AbsMax):
    """8-bit floating point with 4 bits of exponent, for weights and inputs; these have a scale for each token."""

    Settings = Fp8Settings

    @property
    def format(self) -> LowBitFormat:
        block = (128, 128) if self.settings.blocks == "square" else (1, 0)
        return LowBitFormat(weights="float8_e4m3fn", block=block, activations="float8_e4m3fn")
