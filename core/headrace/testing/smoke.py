"""Tries an engine in the interpreter that it lives in: ``python -m headrace.testing.smoke QUESTION ANSWER``.

``headrace doctor`` asks, with a plugin and its settings in the file QUESTION. The engine is started with a tiny model
and does once what a run has it do all the time: an inference engine answers, takes up another version of its weights
and answers under that; a training engine gives log-probs, takes a step and gives its weights. ANSWER is written again
whenever something is known, so that an engine that ends its process leaves what was found before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import json
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import headrace
from headrace.contract import (
    CONTRACT_VERSION,
    Array,
    Batch,
    GenerationOutput,
    GenerationRequest,
    InferenceContext,
    InferenceEngine,
    LossSpec,
    Plugin,
    Ragged,
    Sampling,
    TrainingContext,
    TrainingEngine,
    WeightManifest,
)
from headrace.contract.columns import LOSS_MASK, LOSS_WEIGHTS, TOKENS
from headrace.errors import EngineError, HeadraceError
from headrace.registry import PluginSpec, build, listing
from headrace.testing.tensors import read_tensors
from headrace.testing.tiny import write_tiny_model
from headrace.wire import manifest_digest, tensor_info

TOKENS_ASKED = 8
WAIT = 60.0
"""Seconds for one answer of a tiny model."""
PROMPT = np.array([1, 2, 3], dtype=np.int32)

Note = Callable[..., None]
"""Keeps what is known, by name."""


def main(question: str, answer: str) -> int:
    """0 when the engine did what it was asked to, 1 when it did not; the answer says what."""
    spec = PluginSpec(**json.loads(Path(question).read_text()))
    known: dict[str, Any] = {
        "python": platform.python_version(),
        "headrace": headrace.__version__,
        "contract": CONTRACT_VERSION,
    }

    def note(**more: Any) -> None:
        known.update(more)
        Path(f"{answer}.new").write_text(json.dumps(known))
        Path(f"{answer}.new").replace(answer)  # whole, also if the engine ends this process meanwhile

    try:
        _try(spec, note)
    except Exception as error:  # an engine may raise anything: it is told
        traceback.print_exc()
        note(error=_as_plain(error))
        return 1
    return 0


def _try(spec: PluginSpec, note: Note) -> None:
    plugin = build(spec)
    assert isinstance(plugin, InferenceEngine | TrainingEngine)
    note(versions=_versions(spec, plugin))
    capabilities = plugin.capabilities(plugin.settings)
    note(capabilities=dataclasses.asdict(capabilities))
    with tempfile.TemporaryDirectory(prefix="headrace-smoke-") as path:
        write_tiny_model(type(plugin), path, length=getattr(capabilities, "max_length", None))
        if isinstance(plugin, InferenceEngine):
            asyncio.run(_serve(plugin, path, note))
        else:
            _train(plugin, path, note)


def _versions(spec: PluginSpec, plugin: Plugin) -> dict[str, str]:
    """Of what its setup and its extra name, as far as it is there."""
    setup = plugin.setup()
    names = list(setup.distributions) if setup is not None else []
    names += [name for each in listing(spec.role) if each.name == spec.use for name in each.needs]
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# ---------------------------------------------------------------- inference


async def _serve(engine: InferenceEngine, path: str, note: Note) -> None:
    began = time.monotonic()
    try:
        await engine.start(InferenceContext(name="doctor", model_path=path, version=0, threads=1))
        started = time.monotonic()
        note(start_seconds=started - began)
        outputs = engine.outputs()
        first = await _answer(engine, outputs, 0)
        await _take_up(engine, read_tensors(path), 1)
        second = await _answer(engine, outputs, 1)
        _require(first == second, f"the same weights as version 1 gave tokens {second} in place of {first}")
        note(seconds=time.monotonic() - started, told=f"{len(first)} tokens, the same under versions 0 and 1")
    finally:
        await engine.close()


async def _answer(engine: InferenceEngine, outputs: Any, version: int) -> list[int]:
    """The most likely tokens after the prompt."""
    name = f"smoke-{version}"
    sampling = Sampling(max_new_tokens=TOKENS_ASKED, greedy=True)
    await engine.submit([GenerationRequest(request_id=name, prompt=PROMPT, sampling=sampling, version=version)])
    pieces: list[GenerationOutput] = []
    async with asyncio.timeout(WAIT):
        while not pieces or pieces[-1].finish_reason is None:
            pieces += [output for output in await anext(outputs) if output.request_id == name]
    tokens = [token for piece in pieces for token in piece.token_ids.tolist()]
    logprobs = np.concatenate([piece.logprobs for piece in pieces])
    versions = {span.version for piece in pieces for span in piece.spans}
    _require(len(tokens) == TOKENS_ASKED, f"{len(tokens)} tokens came, {TOKENS_ASKED} were asked for")
    _require(bool(np.isfinite(logprobs).all() and (logprobs <= 1e-3).all()), f"log-probs are {logprobs.tolist()}")
    _require(versions == {version}, f"version {version} was asked for, and {sorted(versions)} sampled the tokens")
    return tokens


async def _take_up(engine: InferenceEngine, tensors: dict[str, Array], version: int) -> None:
    infos = tuple(tensor_info(name, tensor) for name, tensor in tensors.items())
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    manifest = WeightManifest(version=version, tensors=infos, nbytes=nbytes, digest=manifest_digest(infos))
    update = await engine.begin_update(manifest)
    for name, tensor in tensors.items():
        await update.apply(name, tensor)
    await update.commit()


# ---------------------------------------------------------------- training


def _train(engine: TrainingEngine, path: str, note: Note) -> None:
    began = time.monotonic()
    try:
        engine.start(TrainingContext(name="doctor", model_path=path, seed=0, threads=1, total_steps=1))
        started = time.monotonic()
        note(start_seconds=started - began)
        batch, trained = _batch()
        logprobs = engine.forward(batch)["logprobs"].values[batch.ragged(LOSS_MASK).values]
        _require(bool(np.isfinite(logprobs).all() and (logprobs <= 0).all()), f"log-probs are {logprobs.tolist()}")
        step = engine.begin_step(LossSpec(function="headrace.testing.losses:weighted_likelihood"))
        step.accumulate(batch)
        result = step.finish(denominator=trained)
        _require(result.applied, f"the step was not applied: {result}")
        _require(result.gradient_norm > 0, f"the gradient is 0 in {result}")
        tensors = sum(1 for _ in engine.weight_source().tensors())
        _require(tensors == len(read_tensors(path)), f"{tensors} tensors came out of {len(read_tensors(path))}")
        told = f"log-probs of {trained} tokens, a step with loss {result.loss:.3f}, {tensors} tensors out"
        note(seconds=time.monotonic() - started, told=told)
    finally:
        engine.close()


def _batch() -> tuple[Batch, int]:
    """Two rows, and how many of their tokens are trained."""
    tokens = Ragged.from_arrays([np.arange(1, 9, dtype=np.int32), np.arange(3, 8, dtype=np.int32)])
    mask = Ragged.from_arrays([np.arange(8) > 2, np.arange(5) > 2])
    columns = {TOKENS: tokens, LOSS_MASK: mask, LOSS_WEIGHTS: mask.like(mask.values.astype(np.float32))}
    return Batch(rows=np.arange(2), columns=columns), int(mask.values.sum())


def _require(held: bool, otherwise: str) -> None:
    if not held:
        raise EngineError(
            otherwise, fix="run the engine's conformance suite (headrace.testing.suites), which says more"
        )


def _as_plain(error: Exception) -> dict[str, str]:
    if isinstance(error, HeadraceError):
        return {"message": error.message, "origin": error.origin, "fix": error.fix}
    last = traceback.extract_tb(error.__traceback__)[-1]
    return {
        "message": f"{type(error).__name__}: {error}",
        "origin": f"{last.filename}:{last.lineno}",
        "fix": "see the engine's own documents for this error",
    }


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
