"""Log-probabilities and entropies of trained tokens, from logits whose vocabulary is shared by tensor-parallel ranks.

Only what predicts a trained token goes through the output head. Invariant: every log-probability is that of the
tempered distribution over the whole vocabulary, the same on all ranks that share it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headrace.contract.training import ForwardOutput
from headrace_megatron.engine import get_forward_backward_func, parallel_state, reduce_from_tensor_model_parallel_region
from headrace_megatron.micro_batches import MicroBatch
from headrace_torch.trainer.attention import rows_of
from headrace_torch.trainer.scoring import LOGIT_BUDGET

Judge = Callable[[MicroBatch, Mapping[ForwardOutput, Tensor]], Tensor]
"""Gives a micro-batch's scalar, whose gradient is wanted, from the scores of its trained tokens."""


def run(
    model: Any,
    batches: Iterable[MicroBatch],
    judge: Judge,
    *,
    temperature: float,
    outputs: Collection[ForwardOutput],
    gradient: bool,
) -> None:
    """Send micro-batches through the pipeline; ``judge`` is called at its last stage, and where ``gradient`` is wanted
    it goes back through all of them. Collective over the ranks of a share."""
    some = list(batches)
    names: tuple[ForwardOutput, ...] = ("logprobs", "entropy") if "entropy" in outputs else ("logprobs",)

    def forward(iterator: Any, part: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch: MicroBatch = next(iterator)
        processor = partial(_processed, batch=batch, temperature=temperature, names=names)
        found = part(batch.tokens, batch.positions, None, output_processor=processor)

        def judged(scores: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            return judge(batch, dict(zip(names, scores, strict=True))), torch.tensor(0, dtype=torch.int), {}

        return found, judged

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(some),
        model=[model],
        num_microbatches=len(some),
        seq_length=max(batch.tokens.shape[1] for batch in some),
        micro_batch_size=max(batch.tokens.shape[0] for batch in some),
        forward_only=not gradient,
    )


def _processed(
    *,
    batch: MicroBatch,
    temperature: float,
    names: tuple[ForwardOutput, ...],
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    **others: Any,
) -> Tensor:
    """float32 [names, T], of ``hidden_states`` [L, b, d]. With many tokens, their logits are computed again in the
    backward pass."""

    def scored(some: Tensor, targets: Tensor) -> Tensor:
        logits, _ = output_layer(some.unsqueeze(1), weight=output_weight, runtime_gather_output=False)
        return torch.stack(scores(logits.squeeze(1).float() / temperature, targets, entropy="entropy" in names))

    states = rows_of(hidden_states.transpose(0, 1).flatten(0, 1), batch.predicting)
    most = max(1, LOGIT_BUDGET // output_layer.output_size_per_partition)
    if len(states) <= most:
        return scored(states, batch.targets)
    parts = zip(torch.split(states, most), torch.split(batch.targets, most), strict=True)
    return torch.cat([checkpoint(scored, *part, use_reentrant=False, preserve_rng_state=False) for part in parts], 1)


def scores(logits: Tensor, targets: Tensor, *, entropy: bool) -> list[Tensor]:
    """Log-probabilities [T], and entropies [T] if they are wanted, of ``logits`` [T, v], this rank's part of the
    vocabulary, and ``targets`` [T]."""
    group = parallel_state.get_tensor_model_parallel_group()
    peak = logits.detach().amax(-1)
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    shifted = logits - peak.unsqueeze(1)
    odds = shifted.exp()
    total = _over_ranks(odds.sum(-1))
    index = targets - parallel_state.get_tensor_model_parallel_rank() * logits.shape[1]
    here = (index >= 0) & (index < logits.shape[1])
    chosen = shifted.gather(1, torch.where(here, index, 0).unsqueeze(1)).squeeze(1)
    logprobs = _over_ranks(torch.where(here, chosen, 0.0)) - total.log()
    return [logprobs, total.log() - _over_ranks((odds * shifted).sum(-1)) / total] if entropy else [logprobs]


def _over_ranks(part: Tensor) -> Tensor:
    """The sum over tensor-parallel ranks, each of which has the whole gradient."""
    found: Tensor = reduce_from_tensor_model_parallel_region(part)
    return found
