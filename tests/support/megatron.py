"""Engines of Megatron's ranks, and what is asked of them and of others alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.contract import Array, TrainingContext, TrainingEngine
from headrace.contract.columns import TOKENS
from headrace.testing.suites.trainees import Trainee
from headrace_megatron.training import MegatronTrainingEngine
from headrace_torch.training import TorchTrainingEngine
from support.whole_runs import alive

SLOPE: dict[str, Any] = {"learning_rate": 1e6, "eps": 1e6, "betas": (0.0, 0.0), "max_gradient_norm": float("inf")}
"""AdamW's first step is then 1e6 g / (|g| + 1e6), the gradient to a share of |g| / 1e6."""
ONE: dict[str, Any] = {}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": ONE,
    "tp2": {"tensor_parallel": 2},
    "dp2": {"data_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
}


@contextmanager
def started(model_path: str, layout: dict[str, Any] | None, **settings: Any) -> Iterator[Trainee]:
    """An engine on these ranks; None: the torch engine. Its ranks are gone at the end."""
    chosen = {**SLOPE, **settings}
    engine: TrainingEngine
    if layout is None:
        engine = TorchTrainingEngine(TorchTrainingEngine.Settings(**chosen))
    else:
        engine = MegatronTrainingEngine(MegatronTrainingEngine.Settings(**chosen, **layout, rank_deadline=90.0))
    engine.start(TrainingContext(name="trainer", model_path=model_path, seed=5, threads=1, total_steps=20))
    processes = others(engine)
    try:
        yield Trainee(engine, model_path)
    finally:
        engine.close()
    assert alive(processes) == []


def others(engine: Any) -> list[int]:
    """Processes of the ranks above 0."""
    return engine._started._crew.pids if isinstance(engine, MegatronTrainingEngine) else []


def slope(before: dict[str, Array], after: dict[str, Array]) -> Array:
    """The flat gradient of a step with the settings ``SLOPE``."""
    return np.concatenate([(before[n].astype(np.float64) - after[n]).ravel() for n in sorted(before)])


def peer_logprobs(model_path: str, temperature: float) -> Array:
    """Of the trained tokens of a trainee's batch, by transformers; 0 elsewhere."""
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    expected: list[float] = []
    for row in Trainee(None, model_path).batch().ragged(TOKENS):  # type: ignore[arg-type]
        ids = torch.from_numpy(row.astype(np.int64))
        with torch.no_grad():
            table = (peer(ids[None]).logits[0, :-1].float() / temperature).log_softmax(-1)
        expected += [0.0, *table.gather(1, ids[1:, None]).squeeze(1).tolist()]
    return np.array(expected, dtype=np.float32)


def write_mixture(path: Path) -> str:
    """A tiny Qwen3 mixture of 4 experts, of which a token chooses 2; its weights are large: log-probs differ."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter)) if parameter.ndim == 1 else parameter.mul_(6)
    model.save_pretrained(path)
    return str(path)
