"""What continuous batching gains over static batches, on the same engine.

    OMP_NUM_THREADS=1 python tests/benchmarks/continuous_batching.py [--json] [--runs 5]

256 requests with forced log-normal response lengths and 64 slots, on a model of the demo's size (2 layers, one
thread). *static*: batches of 64 whose slots are held until the batch's longest response ends, as a padded batch
holds them; only the wanted tokens count. *waiting*: batches of 64, each awaited before the next, whose finished
sequences leave the decode batch at once. *continuous*: all are submitted together and freed slots are refilled.
The kinds alternate, and seconds are this process's CPU seconds: other work on the machine must not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass

import numpy as np

from headrace.contract import Array, GenerationRequest, InferenceContext, Sampling
from headrace_torch.checkpoint import create_weights, save_model
from headrace_torch.inference import TorchInferenceEngine, TorchInferenceSettings
from headrace_torch.model import Decoder, ModelConfig

REQUESTS = 256
SLOTS = 64
PROMPT = 10
CONTEXT = 256
MEDIAN_LENGTH = 24
SIGMA = 0.8
REQUIRED = 1.7

MODEL = ModelConfig(
    model_type="llama",
    vocab_size=64,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Wanted response tokens per second, medians over the runs."""

    static: float
    waiting: float
    continuous: float
    full: float
    """64 requests of equal length: every slot busy all the time."""
    ratio: float
    """continuous / static."""
    ratio_to_waiting: float
    """continuous / waiting."""
    static_slot_use: float
    """Share of the slots' steps that yield a wanted token in static batches."""
    runs: int


def requests(lengths: Array) -> list[GenerationRequest]:
    """Requests that generate exactly ``lengths`` tokens: no stop token is given."""
    rng = np.random.default_rng(1)
    return [
        GenerationRequest(
            request_id=str(i),
            prompt=rng.integers(3, MODEL.vocab_size, PROMPT).astype(np.int32),
            sampling=Sampling(max_new_tokens=int(length), seed=i),
            version=0,
        )
        for i, length in enumerate(lengths)
    ]


def batches(lengths: Array) -> list[list[GenerationRequest]]:
    """The same requests, 64 at a time."""
    everything = requests(lengths)
    return [everything[i : i + SLOTS] for i in range(0, len(everything), SLOTS)]


async def run(engine: TorchInferenceEngine, batches: list[list[GenerationRequest]], *, wanted: int) -> float:
    """``wanted`` tokens per second of submitting ``batches`` one after another, each when the last has ended."""
    started = time.process_time()
    for batch in batches:
        await engine.submit(batch)
        left = len(batch)
        async for outputs in engine.outputs():
            left -= sum(o.finish_reason is not None for o in outputs)
            if not left:
                break
    return wanted / (time.process_time() - started)


async def measure(runs: int) -> Result:
    """Alternate static and continuous runs on one engine."""
    rng = np.random.default_rng(0)
    drawn = np.exp(rng.normal(np.log(MEDIAN_LENGTH), SIGMA, REQUESTS))
    lengths = np.clip(drawn, 1, CONTEXT - PROMPT).astype(np.int64)
    longest = np.repeat(lengths.reshape(-1, SLOTS).max(1), SLOTS)
    kinds = {
        "static": (batches(longest), int(lengths.sum())),
        "waiting": (batches(lengths), int(lengths.sum())),
        "continuous": ([requests(lengths)], int(lengths.sum())),
        "full": ([requests(np.full(SLOTS, MEDIAN_LENGTH))], SLOTS * MEDIAN_LENGTH),
    }
    engine = TorchInferenceEngine(TorchInferenceSettings(slots=SLOTS))
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as directory:
        model = Decoder(MODEL)
        create_weights(model, 0)
        save_model(model, directory, like=None)
        await engine.start(InferenceContext(name="benchmark", model_path=directory, version=0, threads=1))
        await run(engine, kinds["continuous"][0], wanted=0)
        for _ in range(runs):
            for kind, (submitted, wanted) in kinds.items():
                rates[kind].append(await run(engine, submitted, wanted=wanted))
        await engine.close()
    middle = {kind: statistics.median(values) for kind, values in rates.items()}
    return Result(
        **middle,
        ratio=middle["continuous"] / middle["static"],
        ratio_to_waiting=middle["continuous"] / middle["waiting"],
        static_slot_use=float(lengths.sum() / longest.sum()),
        runs=runs,
    )


def main() -> int:
    """Print the result; exit status 1 when the ratio is below what is required."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=5, help="runs of each kind; the medians count")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.runs))
    if arguments.json:
        print(json.dumps(asdict(result)))
    else:
        print(f"static      {result.static:8.0f} tok/s ({result.static_slot_use:.0%} of the slots' steps wanted)")
        print(f"waiting     {result.waiting:8.0f} tok/s")
        print(f"continuous  {result.continuous:8.0f} tok/s")
        print(f"full batch  {result.full:8.0f} tok/s")
        print(f"continuous is {result.ratio:.2f} x static (at least {REQUIRED} required)", end=", ")
        print(f"{result.ratio_to_waiting:.2f} x waiting")
    return 0 if result.ratio >= REQUIRED else 1


if __name__ == "__main__":
    raise SystemExit(main())
