"""What an engine loses behind its adapter: tokens per second through the adapter and through the bare engine.

    OMP_NUM_THREADS=1 build/vllm/bin/python tests/benchmarks/engine_overhead.py [--engine vllm] [--json] [--rounds 7]

In one process and one run, in the environment of the engine: the same prompts, lengths, seeds and slots, log-probs of
each sampled token on both sides. Rounds of the two alternate, and which of them is first; of each round the ratio is
taken, and the median of the ratios counts. Models are random, in float32: *tiny* is the demo's size, where a step takes
a few milliseconds and every overhead shows, *small* has 45 million parameters.

An engine is a module ``engine_overhead_NAME`` beside this one, with a class ``Sides``.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from headrace.contract import GenerationRequest, Sampling
from headrace_torch.checkpoint import create_weights, save_model
from headrace_torch.model import Decoder, ModelConfig

REQUESTS = 128
SLOTS = 64
PROMPT = 32
MEDIAN_LENGTH = 48
SIGMA = 0.6
CONTEXT = 256
REQUIRED = 0.95
SIZES = {"tiny": (128, 2), "small": (512, 12)}
"""Width and layers."""


class Sides(Protocol):
    """One engine, behind its adapter and without it. Both have the model and take ``SLOTS`` requests at a time."""

    async def start(self, model_path: str, *, slots: int) -> None:
        """Load the model on both sides."""

    async def ours(self, requests: Sequence[GenerationRequest]) -> int:
        """Tokens that the adapter brought, when all requests have ended."""

    async def bare(self, requests: Sequence[GenerationRequest]) -> int:
        """The same, by the engine's own interface."""

    async def close(self) -> None:
        """End both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Medians over the rounds."""

    engine: str
    version: str
    model: str
    ours: float
    """Tokens per second."""
    bare: float
    ratio: float
    """Of ours to bare, the median over the rounds."""
    ratios: list[float]


def model_of(size: str) -> ModelConfig:
    """Heads have 32 numbers: engines compute no smaller ones on a CPU."""
    width, layers = SIZES[size]
    return ModelConfig(
        model_type="llama",
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )


def requests_of(round_: int, side: str) -> list[GenerationRequest]:
    """Of a round the same on both sides but for their names; prompts of another round are others, so that no keys and
    values are there already."""
    rng = np.random.default_rng(round_)
    lengths = np.clip(np.exp(rng.normal(np.log(MEDIAN_LENGTH), SIGMA, REQUESTS)), 1, CONTEXT - PROMPT).astype(int)
    return [
        GenerationRequest(
            request_id=f"{side}-{round_}-{i}",
            prompt=rng.integers(3, 4096, PROMPT).astype(np.int32),
            sampling=Sampling(max_new_tokens=int(length), seed=i),
            version=0,
        )
        for i, length in enumerate(lengths)
    ]


async def rate(
    side: Callable[[Sequence[GenerationRequest]], Awaitable[int]], requests: list[GenerationRequest]
) -> float:
    """Tokens per second. RuntimeError when not all came."""
    wanted = sum(request.sampling.max_new_tokens for request in requests)
    started = time.perf_counter()
    tokens = await side(requests)
    seconds = time.perf_counter() - started
    if tokens != wanted:
        raise RuntimeError(f"{tokens} tokens came, {wanted} were asked for")
    return tokens / seconds


async def measure(engine: str, size: str, rounds: int) -> Result:
    """The first round warms up and does not count."""
    module: Any = importlib.import_module(f"engine_overhead_{engine}")
    sides: Sides = module.Sides()
    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    with tempfile.TemporaryDirectory() as directory:
        model = Decoder(model_of(size))
        create_weights(model, 0)
        save_model(model, directory, like=None)
        await sides.start(directory, slots=SLOTS)
        try:
            for round_ in range(rounds + 1):
                for name in ("ours", "bare") if round_ % 2 else ("bare", "ours"):
                    rates[name].append(await rate(getattr(sides, name), requests_of(round_, name)))
        finally:
            await sides.close()
    ours, bare = rates["ours"][1:], rates["bare"][1:]
    ratios = [one / other for one, other in zip(ours, bare, strict=True)]
    return Result(
        engine=engine,
        version=module.version(),
        model=size,
        ours=statistics.median(ours),
        bare=statistics.median(bare),
        ratio=statistics.median(ratios),
        ratios=[round(ratio, 3) for ratio in ratios],
    )


def main() -> int:
    """Print a line for each model; exit status 1 when a ratio is below what is required."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="vllm", help="a module engine_overhead_NAME")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each model")
    parser.add_argument("--rounds", type=int, default=7, help="of both sides")
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    arguments = parser.parse_args()
    results = []
    for size in arguments.models:
        result = asyncio.run(measure(arguments.engine, size, arguments.rounds))
        results.append(result)
        if arguments.json:
            print(json.dumps(asdict(result)), flush=True)
        else:
            print(
                f"{result.engine} {result.version}, {size} model: {result.ours:.0f} tokens/s through the adapter, "
                f"{result.bare:.0f} bare: {result.ratio:.3f} (at least {REQUIRED} required)",
                flush=True,
            )
    return 0 if all(result.ratio >= REQUIRED for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
