"""What adapter-only versions cost and save, next to versions of all weights.

    OMP_NUM_THREADS=1 python tests/benchmarks/adapter_sync.py [--json] [--runs 3] [--rank 16] [--models small,medium]

The same random model is published by a trainer of all weights and by one of an adapter for every linear layer, over the
zmq transport, to an engine that has served a version before. Of a version: the bytes that travel, and the CPU seconds
of both sides together, to publish it and to fetch and commit it. Of the engine: tokens per CPU second while it decodes
``batch`` requests at a time, which with an adapter takes two products more for each that there is. All of it is in one
process and on one thread, and other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from typing import Any

import numpy as np
from quantized_rollout import BATCHES, SHAPES, model_of, rate

from headrace.contract import InferenceContext, TrainingContext, TransportContext, WeightPublisher, WeightReceiver
from headrace_torch.checkpoint import save_model
from headrace_torch.inference import TorchInferenceEngine, TorchInferenceSettings
from headrace_torch.training import LoraSettings, TorchTrainingEngine, TorchTrainingSettings
from headrace_weights.zmq import ZmqSettings, ZmqTransport

ARMS = ("all weights", "adapter")
DEADLINE = 60.0


class Pair:
    """A trainer with its publisher, and an engine with its receiver."""

    def __init__(self, directory: str, arm: str, rank: int) -> None:
        lora = LoraSettings(rank=rank) if arm == "adapter" else None
        self.trainer = TorchTrainingEngine(TorchTrainingSettings(lora=lora))
        self.trainer.start(TrainingContext(name=arm, model_path=directory, seed=0, threads=1, total_steps=1))
        self.engine = TorchInferenceEngine(TorchInferenceSettings(slots=max(BATCHES), live_versions=2))
        self._directory, self._version = directory, -1
        transport, name = ZmqTransport(ZmqSettings()), arm.replace(" ", "-")
        self._publisher: WeightPublisher = transport.publisher(TransportContext(directory=directory, name=name))
        receiver = TransportContext(directory=directory, name=f"{name}-engine")
        self._receiver: WeightReceiver = transport.receiver(receiver, self._publisher.address())

    async def start(self) -> None:
        context = InferenceContext(name="engine", model_path=self._directory, version=-1, threads=1)
        await self.engine.start(context)

    async def update(self) -> dict[str, float]:
        """The next version, in the place of the one before."""
        before, self._version = self._version, self._version + 1
        began = time.process_time()
        self._publisher.publish(self._version, self.trainer.weight_source())
        published = time.process_time()
        manifest = self._receiver.manifest(self._version, deadline=DEADLINE)
        update = await self.engine.begin_update(manifest)
        wanted = {info.name for info in manifest.tensors if update.wants(info.name)}
        nbytes = 0
        for name, tensor in self._receiver.fetch_some(manifest, wanted, deadline=DEADLINE):
            await update.apply(name, tensor)
            nbytes += tensor.nbytes
        await update.commit()
        tokens = np.arange(4, dtype=np.int32)
        await self.engine.score(tokens, version=self._version, temperature=1.0)  # when it can be served
        loaded = time.process_time()
        await self.engine.retire(before)
        self._publisher.retire(before)
        return {"bytes": nbytes, "publish_seconds": published - began, "load_seconds": loaded - published}

    async def rates(self, vocabulary: int) -> dict[str, float]:
        """Tokens per CPU second, by batch."""
        return {f"tokens_per_second_{b}": await rate(self.engine, b, vocabulary, self._version) for b in BATCHES}

    async def close(self) -> None:
        await self.engine.close()
        self._receiver.close()
        self._publisher.close()
        self.trainer.close()


async def measure(size: str, runs: int, rank: int) -> dict[str, Any]:
    """Arm → figure → median; the first version, with which a base travels, apart."""
    model = model_of(size)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        save_model(model, directory, like=None)
        pairs = {arm: Pair(directory, arm, rank) for arm in ARMS}
        for arm, pair in pairs.items():
            await pair.start()
            found[arm] = {"first_bytes": (await pair.update())["bytes"]}
        figures: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
        for run in range(runs + 1):
            for arm, pair in pairs.items():
                seen = {**await pair.update(), **await pair.rates(model.config.vocab_size)}
                if run:  # the first warms up
                    figures[arm].append(seen)
        for arm, pair in pairs.items():
            found[arm] |= {name: statistics.median(f[name] for f in figures[arm]) for name in figures[arm][0]}
            await pair.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=3, help="the medians count")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--models", default=",".join(SHAPES), help="which of small, medium, large")
    arguments = parser.parse_args()
    sizes = arguments.models.split(",")
    measured = {size: asyncio.run(measure(size, arguments.runs, arguments.rank)) for size in sizes}
    if arguments.json:
        print(json.dumps({"rank": arguments.rank, "models": measured}))
        return
    for size, arms in measured.items():
        for arm, figures in arms.items():
            cells = "".join(f"  {name} {value:.4g}" for name, value in figures.items())
            print(f"{size:7} {arm:12}{cells}")


if __name__ == "__main__":
    main()
