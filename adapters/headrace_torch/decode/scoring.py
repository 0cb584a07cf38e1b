"""Log-probs of given tokens: one sequence through the model, without a cache and without sampling."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.contract.columns import Array
from headrace_torch.decode.flat import FlatDecoder


def token_logprobs(model: FlatDecoder, tokens: Array, *, temperature: float) -> Array:
    """float32 [T] for token ids [T]: entry t is the log-prob of token t after those before it, entry 0 is 0."""
    device = model.device
    ids = torch.from_numpy(np.ascontiguousarray(tokens, dtype=np.int64)).to(device)
    hidden = model.hidden(ids, torch.arange(len(ids), device=device), _causal)
    logprobs = F.log_softmax(model.logits(hidden[:-1]) / temperature, -1)
    scored = logprobs.gather(1, ids[1:, None]).squeeze(1)
    found: Array = F.pad(scored, (1, 0)).cpu().numpy()
    return found


def _causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token sees itself and those before it."""
    mixed = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return mixed[0].transpose(0, 1)
