"""Which requests on their way from another engine can go on here. Knows shapes and names, and no torch."""

from __future__ import annotations

import dataclasses
import json

import xxhash

from headrace.contract.generation import RequestState
from headrace_torch.model_config import ModelConfig

LAYOUT = "headrace_torch/1"
"""Keys and values per layer: [2, KV, tokens, D], keys rotated, positions from 0. Another layout gets another name."""


def kv_fingerprint(config: ModelConfig, *, dtype: str, digest: str | None) -> str:
    """Which keys and values go with which. ``digest``: of the weights; None for those that were loaded at start."""
    facts = [LAYOUT, dataclasses.asdict(config), dtype, digest]
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())


def state_problems(state: RequestState, config: ModelConfig, *, dtype: str, fingerprint: str) -> list[str]:
    """Why a request cannot go on under a live version with this ``fingerprint``, or []."""
    count = len(state.token_ids)
    problems = []
    if (state.token_ids.dtype.name, state.logprobs.dtype.name) != ("int32", "float32") or state.token_ids.ndim != 1:
        problems.append(f"tokens and log-probs are {state.token_ids.dtype} and {state.logprobs.dtype}")
    if state.logprobs.shape != state.token_ids.shape:
        problems.append(f"{count} tokens have log-probs of shape {state.logprobs.shape}")
    begins, ends = [span.start for span in state.spans], [span.stop for span in state.spans]
    if [*begins, count] != [0, *ends]:
        problems.append(f"the spans {list(zip(begins, ends, strict=True))} do not cover {count} tokens")
    if not 0 <= state.reported <= count:
        problems.append(f"{state.reported} of {count} tokens are said to be reported")
    if count and not 0 <= state.token_ids.min() <= state.token_ids.max() < config.vocab_size:
        problems.append(f"token ids are outside 0 to {config.vocab_size - 1}")
    return problems + (_kv_problems(state, config, dtype, fingerprint) if state.kv else [])


def _kv_problems(state: RequestState, config: ModelConfig, dtype: str, fingerprint: str) -> list[str]:
    if state.fingerprint != fingerprint:
        return [f"its keys and values have the fingerprint {state.fingerprint}, those here {fingerprint}"]
    tokens = len(state.request.prompt) + len(state.token_ids) - 1
    expected = [(dtype, (2, config.num_key_value_heads, tokens, config.head_dim))] * config.num_hidden_layers
    found = [(array.dtype.name, array.shape) for array in state.kv]
    if found == expected and len(state.token_ids):
        return []
    return [f"keys and values of {len(found)} layers, {found[0]}; expected are {len(expected)}, {expected[0]}"]
