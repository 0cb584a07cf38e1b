"""Whether an instance and the trainer mean the same by the same weights.

Catches wrong weights, a wrong config or a wrong temperature before the first batch instead of as a slow decline.

What is compared is the mean over tokens that the model sampled itself. In bfloat16 two right engines differ by 0.05 to
0.1 nats per such token (SmolLM2-135M, cached against packed), by 0.7 for the worst of 24, and by 5 for tokens that the
model thinks impossible: neither a largest difference nor made-up tokens tell a wrong engine from a right one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from headrace.contract import Array, Batch, Completion, GenerationRequest, Ragged, Sampling
from headrace.contract.columns import LOSS_MASK, TOKENS
from headrace.errors import EngineError
from headrace.services.messages import Probe
from headrace.services.request_messages import GenerateCall, Generated
from headrace.wire import Client

SAMPLED_TOKENS = 24
DEADLINE = 60.0

_PROMPT = np.array([3], dtype=np.int32)
"""A token id that every vocabulary has."""


class Sampled(NamedTuple):
    """A probe that an instance sampled, and its log-probs there and at the trainer, float32 [T], 0 for the first."""

    probe: Probe
    instance: Array
    trainer: Array


def mean_gap(left: Array, right: Array) -> float:
    """Nats per token but the first, NaN when one side is not finite."""
    return float(np.abs(left - right)[1:].mean())


def require_agreement(name: str, version: int, gap: float, tolerance: float) -> None:
    """EngineError when instance ``name`` and the trainer differ by more than ``tolerance`` nats, or by NaN."""
    if not gap <= tolerance:
        raise EngineError(
            f"trainer and {name} disagree on the same tokens under the same weights: "
            f"mean |log-prob difference| {gap:.3g}, at most {tolerance:.3g} was expected",
            origin=f"self-check of version {version}",
            fix="compare the engines' model config, dtype and temperature handling",
        )


class Agreement:
    """``temperature``: of sampling. ``tolerance``: nats per token by which an instance and the trainer may differ on
    the same tokens under the same weights."""

    def __init__(self, *, emit: Callable[..., Any], temperature: float, tolerance: float) -> None:
        self.probe: Probe | None = None
        """What the first instance sampled; every version after that is probed with it."""
        self._emit = emit
        self._temperature = temperature
        self._tolerance = tolerance

    def loaded(self, name: str, version: int, own: Array | None, trainer: Array | None, *, checked: bool) -> bool:
        """An instance gives these log-probs of the probe under a version that it has loaded; whether it has proved to
        compute what the trainer computes. EngineError when it does not. Logged when it was not ``checked`` before, and
        when it differs."""
        if own is None or trainer is None:
            return checked
        gap = mean_gap(own, trainer)
        if not checked or not gap <= self._tolerance:
            self._tell(name, version, gap)
        require_agreement(name, version, gap, self._tolerance)
        return True

    async def sampled(self, name: str, instance: Client, trainer: Client, version: int) -> Sampled:
        """Have an instance sample, and compare. EngineError when the two differ, WireError when one is lost."""
        found = await sample(name, instance, trainer, version, self._temperature)
        gap = mean_gap(found.instance, found.trainer)
        self._tell(name, version, gap)
        require_agreement(name, version, gap, self._tolerance)
        return found

    def _tell(self, name: str, version: int, gap: float) -> None:
        self._emit("self_check", instance=name, version=version, mean_abs_logprob_diff=gap, tolerance=self._tolerance)


async def sample(name: str, instance: Client, trainer: Client, version: int, temperature: float) -> Sampled:
    """Sample a few tokens at the instance and have the trainer score them."""
    completion = await _completion(name, instance, version, temperature)
    tokens = np.concatenate([_PROMPT, completion.token_ids])
    batch = Batch(
        rows=np.zeros(1, dtype=np.int64),
        columns={
            TOKENS: Ragged.from_arrays([tokens]),
            LOSS_MASK: Ragged.from_arrays([np.arange(len(tokens)) >= len(_PROMPT)]),
        },
    )
    scored = await trainer.call(
        "logprobs", batch, reply=Batch, deadline=DEADLINE, awaiting="the trainer to score the probe"
    )
    there = np.concatenate([np.zeros(len(_PROMPT), np.float32), completion.logprobs])
    return Sampled(Probe(tokens=tokens, temperature=temperature), there, scored.ragged("logprobs")[0])


async def _completion(name: str, instance: Client, version: int, temperature: float) -> Completion:
    request = GenerationRequest(
        request_id=f"probe-{name}",
        prompt=_PROMPT,
        sampling=Sampling(max_new_tokens=SAMPLED_TOKENS, temperature=temperature, seed=1),
        version=version,
    )
    generated = await instance.call(
        "generate",
        GenerateCall(request=request),
        reply=Generated,
        deadline=DEADLINE,
        awaiting=f"{name} to answer the probe",
    )
    assert generated.completion is not None, "a probe does not move"
    return generated.completion
