"""Log-probabilities, entropies and values of a plan's trainable tokens.

Only predicting nodes go through the output head, and with a large vocabulary only some of them at a time: their logits
are computed again in the backward pass. Invariant: every log-probability is that of the tempered distribution.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headrace.contract.columns import Array
from headrace.contract.training import ForwardOutput
from headrace.errors import ConfigError, ContractError
from headrace_torch.model import Decoder
from headrace_torch.trainer.attention import PackedAttention, rows_of
from headrace_torch.trainer.packing import Plan
from headrace_torch.trainer.parameters import Network, ValueHead

LOGIT_BUDGET = 1 << 25
"""Logits held at once (float32: 128 MiB, and a few times that during the backward pass)."""


def require_temperature(temperature: float) -> None:
    """ConfigError unless a distribution can be tempered with it."""
    if not 0.0 < temperature < float("inf"):
        raise ConfigError(
            f"temperature {temperature}: log-probabilities are trained at the temperature of the rollout, above 0",
            fix="set [rollout] temperature above 0 (evaluation has its own greedy mode)",
        )


def score_plan(
    network: Network, plan: Plan, *, temperature: float, outputs: Collection[ForwardOutput]
) -> Mapping[ForwardOutput, Tensor]:
    """The ``outputs``, float32 [T] each, in the order of ``plan.trainable``; log-probs and entropies in nats.
    ContractError for values of a network without a critic."""
    model = network.model
    device = model.output_weight.device

    def tensor(array: Array) -> Tensor:
        return torch.from_numpy(array).to(device)

    attention = PackedAttention(plan.buckets, tensor(plan.attended), device=device)
    hidden = model(tensor(plan.tokens), tensor(plan.positions), attention)
    states, predictor, targets = rows_of(hidden, tensor(plan.predicting)), tensor(plan.predictor), tensor(plan.targets)
    found: dict[ForwardOutput, Tensor] = {}
    if "values" in outputs:
        found["values"] = rows_of(require_critic(network)(states).unsqueeze(1), predictor).squeeze(1)
    entropy = "entropy" in outputs
    if entropy or "logprobs" in outputs:
        chunk = max(1, LOGIT_BUDGET // model.config.vocab_size)
        arguments = (model, states, predictor, targets, temperature, entropy)
        many = len(states) > chunk
        logprobs, entropies = _chunked_scores(*arguments, chunk=chunk) if many else _scores(*arguments)
        found["logprobs"] = logprobs
        if entropies is not None:
            found["entropy"] = entropies
    return found


def require_critic(network: Network) -> ValueHead:
    """ContractError when there is none."""
    if network.critic is None:
        raise ContractError(
            "values were asked of a training engine that keeps no critic",
            fix="an algorithm whose loss has LossSpec.values must say AlgorithmNeeds.values",
        )
    return network.critic


def _chunked_scores(
    model: Decoder,
    states: Tensor,
    predictor: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: bool,
    *,
    chunk: int,
) -> tuple[Tensor, Tensor | None]:
    order = torch.argsort(predictor, stable=True)
    bounds = torch.arange(0, len(states) + chunk, chunk, device=states.device)
    cuts = torch.searchsorted(predictor[order], bounds).tolist()
    parts = []
    for index, some in enumerate(torch.split(states, chunk)):
        chosen = order[cuts[index] : cuts[index + 1]]
        arguments = (model, some, predictor[chosen] - index * chunk, targets[chosen], temperature, entropy)
        parts.append(checkpoint(_scores, *arguments, use_reentrant=False, preserve_rng_state=False))
    original = torch.argsort(order)
    logprobs = torch.cat([part[0] for part in parts])[original]
    return logprobs, torch.cat([part[1] for part in parts])[original] if entropy else None


def _scores(
    model: Decoder, states: Tensor, predictor: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """``states``: [P, d]; ``predictor``: int64 [T], index into ``states``; ``targets``: int64 [T]."""
    logits = model.logits(states)
    if temperature != 1.0:
        logits = logits / temperature
    table = torch.log_softmax(logits, dim=-1)
    logprobs = rows_of(table.reshape(-1, 1), predictor * table.shape[1] + targets).squeeze(1)
    if not entropy:
        return logprobs, None
    entropies = -(table.exp() * table).sum(-1, keepdim=True)
    return logprobs, rows_of(entropies, predictor).squeeze(1)
