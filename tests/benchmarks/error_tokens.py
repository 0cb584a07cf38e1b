"""A rollout engine that garbles some answers, as an under-trained low-bit policy does: for ``quantized_arms.py``.

``rollout.use = "./error_tokens.py:ErrorTokens"``. From a quarter on, an answer that is chosen has random symbols in
place of its own, and keeps their log-probs: tokens that were sampled as probable and that no trainer finds so, in a
run, in an answer that fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from zlib import crc32

import numpy as np

from headrace.contract import GenerationOutput, GenerationRequest
from headrace_torch.inference import TorchInferenceEngine

ONE_IN = 50
"""Answers of which one is garbled."""
SYMBOLS = (3, 39)
"""Range of token ids that stand for symbols."""


class ErrorTokens(TorchInferenceEngine):
    """Which answers are garbled follows from their requests. Those of the self-check, whose prompt is one token, are
    not."""

    _garbled: set[str]

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._garbled = getattr(self, "_garbled", set())
        self._garbled |= {
            r.request_id for r in requests if len(r.prompt) > 1 and not crc32(r.request_id.encode()) % ONE_IN
        }
        await super().submit(requests)

    async def outputs(self) -> AsyncIterator[list[GenerationOutput]]:
        async for outputs in super().outputs():
            yield [garbled(output) if output.request_id in self._garbled else output for output in outputs]


def garbled(output: GenerationOutput) -> GenerationOutput:
    """The last token, which ends the answer, stays."""
    tokens = output.token_ids.copy()
    chance = np.random.default_rng(crc32(output.request_id.encode()))
    start = len(tokens) // 4
    tokens[start:-1] = chance.integers(*SYMBOLS, len(tokens[start:-1]))
    return dataclasses.replace(output, token_ids=tokens)
