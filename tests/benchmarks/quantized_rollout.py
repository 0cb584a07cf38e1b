"""What low-bit weights gain in decoding, on the same engine, model and requests.

    OMP_NUM_THREADS=1 python tests/benchmarks/quantized_rollout.py [--json] [--runs 3] [--models small,medium,large]

Each arm is an engine that serves the same random weights: in float32 or bfloat16, as they are or low-bit under a
scheme, where everything that is not low-bit has the engine's dtype. An arm decodes ``batch`` requests of equal length
at a time, on one thread, after a prompt of a few tokens. Arms alternate, and seconds are this process's CPU seconds:
other work on the machine must not count. What stands in brackets is the rate over that of the faster of the two full
precisions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Literal

import ml_dtypes
import numpy as np

from headrace.contract import (
    Array,
    GenerationRequest,
    InferenceContext,
    Quantization,
    Sampling,
    WeightManifest,
    WeightSource,
)
from headrace.services.low_bit import LowBitSource
from headrace.wire import manifest_digest, tensor_info
from headrace_quantization.schemes import W4A8, Fp8E4M3, W4A16Int4, W8A8Int8
from headrace_torch.arrays import as_numpy
from headrace_torch.checkpoint import create_weights, save_model
from headrace_torch.inference import TorchInferenceEngine, TorchInferenceSettings
from headrace_torch.low_bit import kernels
from headrace_torch.model import Decoder, ModelConfig

BATCHES = (1, 8, 16, 64)
PROMPT = 8
TOKENS = 48
"""Of each answer."""
SHAPES = {"small": (128, 344, 2, 64), "medium": (384, 1024, 8, 4096), "large": (576, 1536, 16, 16384)}
"""Hidden size, inner size, layers, vocabulary: 0.4, 17 and 62 million parameters."""
SCHEMES: dict[str, Quantization] = {
    "w8a8_int8": W8A8Int8(W8A8Int8.Settings()),
    "w4a16_int4": W4A16Int4(W4A16Int4.Settings()),
    "w4a8": W4A8(W4A8.Settings()),
    "fp8_e4m3": Fp8E4M3(Fp8E4M3.Settings()),
}
ARMS: dict[str, tuple[str, Literal["float32", "bfloat16"]]] = {
    "float32": ("", "float32"),
    "bfloat16": ("", "bfloat16"),
    "w8a8_int8": ("w8a8_int8", "float32"),
    "w8a8_int8 in bfloat16": ("w8a8_int8", "bfloat16"),
    "w4a16_int4 in bfloat16": ("w4a16_int4", "bfloat16"),
    "w4a8 in bfloat16": ("w4a8", "bfloat16"),
    "fp8_e4m3": ("fp8_e4m3", "float32"),
}
"""Scheme, if any, and dtype of the rest. Of int4 there is a kernel for bfloat16 alone, of float8 none."""


def model_of(size: str) -> Decoder:
    hidden, inner, layers, vocabulary = SHAPES[size]
    config = ModelConfig(
        model_type="llama",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 192, 1),
        head_dim=64,
        max_position_embeddings=PROMPT + TOKENS,
        tie_word_embeddings=True,
    )
    model = Decoder(config)
    create_weights(model, 0)
    return model


class Weights(WeightSource):
    """Of a model."""

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def tensors(self) -> Iterator[tuple[str, Array]]:
        for name, parameter in self._model.named_parameters():
            yield name, as_numpy(parameter.detach())


async def engine_of(directory: str, model: Decoder, arm: str) -> TorchInferenceEngine:
    """An engine that got the weights as a run's engine gets them."""
    name, dtype = ARMS[arm]
    scheme = SCHEMES.get(name)
    engine = TorchInferenceEngine(TorchInferenceSettings(slots=max(BATCHES), dtype=dtype))
    await engine.start(InferenceContext(name=arm, model_path=directory, version=-1, threads=1, quantization=scheme))
    source: WeightSource = Weights(model)
    tensors = dict((LowBitSource(source, scheme) if scheme else source).tensors())
    if dtype == "bfloat16":
        own = [n for n, _ in model.named_parameters() if n in tensors and tensors[n].dtype == np.float32]
        tensors |= {n: tensors[n].astype(ml_dtypes.bfloat16) for n in own}
    infos = tuple(tensor_info(name, tensor) for name, tensor in tensors.items())
    manifest = WeightManifest(version=0, tensors=infos, nbytes=0, digest=manifest_digest(infos))
    update = await engine.begin_update(manifest)
    for name, tensor in tensors.items():
        await update.apply(name, tensor)
    await update.commit()
    await engine.retire(-1)
    return engine


async def rate(engine: TorchInferenceEngine, batch: int, vocabulary: int, version: int = 0) -> float:
    """Tokens per CPU second."""
    generator = np.random.default_rng(batch)
    requests = [
        GenerationRequest(
            request_id=str(i),
            prompt=generator.integers(3, vocabulary, PROMPT).astype(np.int32),
            sampling=Sampling(max_new_tokens=TOKENS - 1, seed=i),
            version=version,
        )
        for i in range(batch)
    ]
    started = time.process_time()
    await engine.submit(requests)
    left = batch
    async for outputs in engine.outputs():
        left -= sum(output.finish_reason is not None for output in outputs)
        if not left:
            break
    return batch * (TOKENS - 1) / (time.process_time() - started)


async def measure(size: str, runs: int) -> dict[str, dict[int, float]]:
    """Arm → batch → tokens per second, medians."""
    model = model_of(size)
    found: dict[str, dict[int, list[float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        save_model(model, directory, like=None)
        engines = {arm: await engine_of(directory, model, arm) for arm in ARMS}
        for run in range(runs + 1):
            for batch in BATCHES:
                for arm, engine in engines.items():
                    tokens = await rate(engine, batch, model.config.vocab_size)
                    if run:  # the first warms up
                        found.setdefault(arm, {}).setdefault(batch, []).append(tokens)
        for engine in engines.values():
            await engine.close()
    return {arm: {batch: statistics.median(r) for batch, r in rates.items()} for arm, rates in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=3, help="the medians count")
    parser.add_argument("--models", default=",".join(SHAPES), help="which of small, medium, large")
    arguments = parser.parse_args()
    exact = [way.__name__.strip("_") for way in kernels._WAYS if kernels._is_exact(way)]
    used = {
        "int8": " or ".join(exact) or "float32",  # each shape has the quickest of them
        "int4": "packed" if kernels._int4_is_right() else "float32",
    }
    measured = {size: asyncio.run(measure(size, arguments.runs)) for size in arguments.models.split(",")}
    if arguments.json:
        print(json.dumps({"kernels": used, "tokens_per_second": measured}))
        return
    print(", ".join(f"{kind} by {way}" for kind, way in used.items()))
    for size, arms in measured.items():
        full = {batch: max(arms["float32"][batch], arms["bfloat16"][batch]) for batch in BATCHES}
        for arm, rates in arms.items():
            cells = [f"{rates[batch]:8.0f} ({rates[batch] / full[batch]:4.2f} x)" for batch in BATCHES]
            print(f"{size:7} {arm:22}" + "".join(cells))


if __name__ == "__main__":
    main()
