"""Tiny models for engines that are not ours, and what ``transformers`` makes of the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from headrace.contract import Array
from headrace.testing.suites.serving import Answer

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
"""Heads of 32 numbers are the smallest that vLLM computes on a CPU."""


def write_model(folder: Path, kind: str, *, seed: int, **changes: Any) -> str:
    """A random model of ``transformers``, in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def reference(path: str, tokens: Array, *, temperature: float = 1.0) -> Array:
    """float32 [T]: log-probs by ``transformers`` in float32, 0 for the first."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.inference_mode():
        logprobs = (model(ids[None]).logits[0, :-1].float() / temperature).log_softmax(-1)
    chosen = logprobs.gather(1, ids[1:, None]).squeeze(1).numpy()
    return np.concatenate([np.zeros(1, np.float32), chosen])


def gap(path: str, prompt: Array, answer: Answer, *, temperature: float = 1.0) -> float:
    """Largest difference between an answer's log-probs and those of ``transformers`` with the model at ``path``."""
    tokens = np.concatenate([prompt, np.array(answer.tokens, np.int32)])
    found = reference(path, tokens, temperature=temperature)[len(prompt) :]
    return float(np.abs(found - np.array(answer.logprobs)).max())
