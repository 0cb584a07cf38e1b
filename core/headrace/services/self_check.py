"""Whether an instance and the trainer mean the same by the same weights.

Catches wrong weights, a wrong config or a wrong temperature before the first batch instead of as a slow decline.
"""

from __future__ import annotations

import numpy as np

from headrace.contract import Array, Batch, Completion, GenerationRequest, Ragged, Sampling
from headrace.contract.columns import LOSS_MASK, TOKENS
from headrace.errors import EngineError
from headrace.services.messages import GenerateCall, Probe
from headrace.wire import Client

SAMPLED_TOKENS = 16
DEADLINE = 60.0

_IDS = np.array([3, 4, 5, 6, 7, 5, 3, 7, 6, 4, 4, 6, 3, 5, 7, 7], dtype=np.int32)
"""Token ids that every vocabulary has."""


def probe(temperature: float) -> Probe:
    """What every version is probed with."""
    return Probe(tokens=_IDS, temperature=temperature)


def largest_gap(left: Array, right: Array) -> float:
    """Nats, NaN when one side is not finite."""
    return float(np.abs(left - right).max())


def require_agreement(name: str, version: int, gap: float, tolerance: float) -> None:
    """EngineError when instance ``name`` and the trainer differ by more than ``tolerance`` nats, or by NaN."""
    if not gap <= tolerance:
        raise EngineError(
            f"trainer and {name} disagree on the same tokens under the same weights: "
            f"max |log-prob difference| {gap:.3g}, at most {tolerance:.3g} was expected",
            origin=f"self-check of version {version}",
            fix="compare the engines' model config, dtype and temperature handling",
        )


async def sampling_gap(name: str, instance: Client, trainer: Client, version: int, probe: Probe) -> float:
    """Sample a few tokens at the instance and have the trainer score them: nats between the two."""
    prompt = probe.tokens[:5]
    completion = await _sampled(name, instance, version, prompt, probe.temperature)
    tokens = np.concatenate([prompt, completion.token_ids])
    batch = Batch(
        rows=np.zeros(1, dtype=np.int64),
        columns={
            TOKENS: Ragged.from_arrays([tokens]),
            LOSS_MASK: Ragged.from_arrays([np.arange(len(tokens)) >= len(prompt)]),
        },
    )
    scored = await trainer.call(
        "logprobs", batch, reply=Batch, deadline=DEADLINE, awaiting="the trainer to score the probe"
    )
    return largest_gap(scored.ragged("logprobs")[0][len(prompt) :], completion.logprobs)


async def _sampled(name: str, instance: Client, version: int, prompt: Array, temperature: float) -> Completion:
    request = GenerationRequest(
        request_id=f"probe-{name}",
        prompt=prompt,
        sampling=Sampling(max_new_tokens=SAMPLED_TOKENS, temperature=temperature, seed=1),
        version=version,
    )
    return await instance.call(
        "generate",
        GenerateCall(request=request),
        reply=Completion,
        deadline=DEADLINE,
        awaiting=f"{name} to answer the probe",
    )
