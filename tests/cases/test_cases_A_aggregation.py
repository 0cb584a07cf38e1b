"""Cases A: loss aggregation and gradient normalisation, through the real plugins and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from headrace.contract import Batch, LossInputs, LossOutput, Prepared, Ragged
from headrace.contract.columns import (
    ADVANTAGES,
    BEHAVIOUR_LOGPROBS,
    DENOMINATOR,
    GROUP,
    LOSS_MASK,
    LOSS_WEIGHTS,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    REWARD,
    TOKENS,
    TRUNCATED,
)
from headrace.errors import ContractError
from headrace_algorithms.grpo import Grpo
from headrace_algorithms.losses import cross_entropy, policy_loss
from headrace_algorithms.settings import GrpoSettings

LOSSES = ([1.0], [2.0, 2.0, 2.0], [3.0, 5.0], [1.0, 1.0, 1.0, 1.0])
"""Case A01's per-token losses of four sequences."""
GROUPS = (0, 1, 0, 1)
"""Case A01's prompts: {0, 2} and {1, 3}."""
REWARDS = (1.0, 0.0, 0.0, 1.0)
SPLITS = ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]], [[3], [0, 2, 1]], [[], [0, 1, 2, 3], []])
EXPECTED = {
    "token_mean": 1.9,
    "sequence_mean_token_mean": 2.0,
    "sequence_mean_token_sum": 4.75,
    "constant": 0.59375,
    "prompt_mean": 2.214286,
}


def rows_of(
    lengths: Sequence[int], rewards: Sequence[float], groups: Sequence[int], *, prompt: int = 2, pad: int = 0
) -> Batch:
    """Rows with a prompt, ``lengths`` trainable tokens and ``pad`` untrained tokens at the end."""
    masks = [np.array([False] * prompt + [True] * n + [False] * pad) for n in lengths]
    return Batch(
        rows=np.arange(len(masks), dtype=np.int64),
        columns={
            TOKENS: Ragged.from_arrays([np.arange(len(m), dtype=np.int32) for m in masks], dtype=np.int32),
            LOSS_MASK: Ragged.from_arrays(masks, dtype=np.bool_),
            REWARD: np.array(rewards, dtype=np.float32),
            GROUP: np.array(groups, dtype=np.int64),
            TRUNCATED: np.zeros(len(masks), dtype=np.bool_),
        },
    )


def prepare(batch: Batch, **settings: Any) -> Prepared:
    return Grpo(GrpoSettings(**settings)).prepare(batch)


def aggregation_settings(aggregation: str) -> dict[str, Any]:
    return {"aggregation": aggregation} | ({"constant_length": 8} if aggregation == "constant" else {})


def call(
    grpo: Grpo, batch: Batch, prepared: Prepared, logprobs: Sequence[torch.Tensor], chosen: Sequence[int]
) -> LossOutput:
    """The policy loss of the rows ``chosen``, as an engine calls it. ``logprobs``: trainable tokens of each row."""
    mask, spec = batch.ragged(LOSS_MASK), grpo.loss(temperature=1.0)
    weights, advantages = prepared.columns[LOSS_WEIGHTS], prepared.columns[ADVANTAGES]
    assert isinstance(weights, Ragged)
    assert isinstance(advantages, Ragged)
    joined = torch.cat([logprobs[0][:0], *(logprobs[i] for i in chosen)])

    def selected(column: Ragged) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([column.values[:0], *(column[i][mask[i]] for i in chosen)]))

    constant = {
        name: joined.detach() - shift
        for name, shift in ((BEHAVIOUR_LOGPROBS, 0.1), (PROXIMAL_LOGPROBS, 0.05), (REFERENCE_LOGPROBS, -0.2))
    }
    counts = [len(logprobs[i]) for i in chosen]
    inputs = LossInputs(
        logprobs=joined,
        weights=selected(weights),
        sequence=torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64)),
        sequences=len(counts),
        columns={
            name: c for name, c in ({ADVANTAGES: selected(advantages)} | constant).items() if name in spec.columns
        },
    )
    return policy_loss(inputs, **spec.settings)


def supervised_numerator(values: torch.Tensor, weights: np.ndarray) -> torch.Tensor:
    """Sum of ``weights * values``, by the loss whose per-token value is minus the log-prob."""
    inputs = LossInputs(
        logprobs=-values,
        weights=torch.from_numpy(weights),
        sequence=torch.zeros(len(weights), dtype=torch.int64),
        sequences=1,
        columns={},
    )
    numerator: torch.Tensor = cross_entropy(inputs).numerator
    return numerator


def row_numerators(batch: Batch, prepared: Prepared) -> list[float]:
    weights, mask = prepared.columns[LOSS_WEIGHTS], batch.ragged(LOSS_MASK)
    assert isinstance(weights, Ragged)
    return [
        supervised_numerator(torch.tensor(LOSSES[i]), weights[i][mask[i]]).item() if mask[i].any() else 0.0
        for i in range(len(batch))
    ]


@pytest.mark.parametrize("aggregation", EXPECTED)
@pytest.mark.parametrize("pad", [0, 12])
def test_A01_loss_does_not_depend_on_the_split(aggregation: str, pad: int) -> None:
    batch = rows_of([len(x) for x in LOSSES], REWARDS, GROUPS, pad=pad)
    prepared = prepare(batch, **aggregation_settings(aggregation))
    numerators, denominators = row_numerators(batch, prepared), prepared.columns[DENOMINATOR]
    for split in SPLITS:
        numerator = sum(sum(numerators[i] for i in micro) for micro in split)
        denominator = sum(float(denominators[micro].sum()) for micro in (np.array(m, dtype=int) for m in split))
        assert numerator / denominator == pytest.approx(EXPECTED[aggregation], abs=1e-6)


@pytest.mark.parametrize("aggregation", EXPECTED)
@pytest.mark.parametrize("loss", ["clipped", "decoupled", "importance"])
def test_A01_gradient_of_a_linear_model_does_not_depend_on_the_split(aggregation: str, loss: str) -> None:
    generator = torch.Generator().manual_seed(1)
    features = [torch.randn(len(x), 5, generator=generator, dtype=torch.float64) for x in LOSSES]
    batch = rows_of([len(x) for x in LOSSES], REWARDS, GROUPS)
    grpo = Grpo(GrpoSettings(loss=loss, kl_coefficient=0.1, **aggregation_settings(aggregation)))
    prepared = grpo.prepare(batch)
    denominator = float(np.sum(prepared.columns[DENOMINATOR]))
    results = []
    for split in SPLITS:
        theta = torch.linspace(-0.3, 0.3, 5, dtype=torch.float64, requires_grad=True)
        total = 0.0
        for micro in split:
            output = call(grpo, batch, prepared, [x @ theta for x in features], micro)
            output.numerator.backward()
            total += output.numerator.item()
        assert theta.grad is not None
        results.append((total / denominator, theta.grad / denominator))
    for value, gradient in results[1:]:
        assert value == pytest.approx(results[0][0], rel=1e-6)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-6, atol=1e-8)


def test_A02_the_constant_divisor_is_the_users_number_and_no_tensor_width() -> None:
    for pad in (0, 12):
        batch = rows_of([len(x) for x in LOSSES], REWARDS, GROUPS, pad=pad)
        prepared = prepare(batch, aggregation="constant", constant_length=8)
        total = sum(row_numerators(batch, prepared)) / float(np.sum(prepared.columns[DENOMINATOR]))
        assert total == pytest.approx(0.59375)


@pytest.mark.parametrize("aggregation", EXPECTED)
def test_A03_a_masked_truncated_row_leaves_numerator_and_denominator(aggregation: str) -> None:
    settings = aggregation_settings(aggregation) | {"mask_truncated": True, "kl_coefficient": 0.1}
    lengths = [2, 3, 4, 1]
    batch = rows_of(lengths, [1, 0, 0, 1], [0, 0, 0, 0])
    cut = prepare(batch.with_columns({TRUNCATED: np.array([False, False, True, False])}), **settings)
    weights = cut.columns[LOSS_WEIGHTS]
    assert isinstance(weights, Ragged)
    assert not cut.trained[2]
    assert not weights[2].any()
    denominators = np.asarray(cut.columns[DENOMINATOR])
    assert denominators[2] == 0
    kept = {"token_mean": 6.0, "constant": 24.0, "prompt_mean": 1.0}
    assert denominators.sum() == pytest.approx(kept.get(aggregation, 3.0))
    assert sum(float(weights[i].sum()) for i in (0, 1, 3)) == pytest.approx(
        {"prompt_mean": 1.0, "sequence_mean_token_mean": 3.0}.get(aggregation, 6.0)
    )


@pytest.mark.parametrize("aggregation", EXPECTED)
def test_A03_a_fully_masked_batch_has_denominator_0_and_a_finite_zero_gradient(aggregation: str) -> None:
    grpo = Grpo(GrpoSettings(mask_truncated=True, **aggregation_settings(aggregation)))
    batch = rows_of([2, 3], [1, 0], [0, 0]).with_columns({TRUNCATED: np.array([True, True])})
    prepared = grpo.prepare(batch)
    assert float(np.sum(prepared.columns[DENOMINATOR])) == 0.0
    assert not prepared.trained.any()
    logprobs = [torch.full((n,), -1.0, requires_grad=True) for n in (2, 3)]
    output = call(grpo, batch, prepared, logprobs, [0, 1])
    output.numerator.backward()
    assert output.numerator.item() == 0.0
    for leaf in logprobs:
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_A04_rejected_tokens_leave_the_numerator_and_stay_in_the_denominator() -> None:
    log_ratios = torch.tensor([0.2, -1.2, 0.9, -6.0, 0.4])
    grpo = Grpo(GrpoSettings(loss="importance", keep_floor=0.5, keep_cap=2))
    current = torch.full((5,), -7.0, requires_grad=True)
    output = policy_loss(
        LossInputs(
            logprobs=current,
            weights=torch.ones(5),
            sequence=torch.zeros(5, dtype=torch.int64),
            sequences=1,
            columns={ADVANTAGES: torch.ones(5), BEHAVIOUR_LOGPROBS: current.detach() - log_ratios},
        ),
        **grpo.loss(temperature=1.0).settings,
    )
    output.numerator.backward()
    assert current.grad is not None
    assert [bool(g) for g in current.grad] == [True, False, False, False, True]
    assert output.numerator.item() / 5 == pytest.approx(-0.542645, abs=1e-6)
    total, count, _ = output.metrics["mismatch/rejected_share"]
    assert float(total) / count == pytest.approx(3 / 5)


def kl_gradient(coefficient: float, split: Sequence[Sequence[int]]) -> tuple[float, torch.Tensor]:
    batch = rows_of([2] * 8, [1, 0] * 4, [0] * 8)
    grpo = Grpo(GrpoSettings(kl_coefficient=coefficient))
    prepared = grpo.prepare(batch)
    theta = torch.full((8, 2), -1.0, requires_grad=True)
    numerators = [call(grpo, batch, prepared, list(theta), micro).numerator for micro in split]
    total = torch.stack(numerators).sum() / float(np.sum(prepared.columns[DENOMINATOR]))
    total.backward()
    assert theta.grad is not None
    return total.item(), theta.grad


def test_A05_the_kl_term_acts_and_does_not_grow_with_the_number_of_micro_batches() -> None:
    whole, pieces = [range(8)], [[i] for i in range(8)]
    loss_whole, gradient_whole = kl_gradient(0.1, whole)
    loss_pieces, gradient_pieces = kl_gradient(0.1, pieces)
    loss_without, gradient_without = kl_gradient(0.0, whole)
    assert loss_whole - loss_without != pytest.approx(0.0, abs=1e-4)
    assert not torch.allclose(gradient_whole, gradient_without)
    assert loss_pieces == pytest.approx(loss_whole, abs=1e-6)
    torch.testing.assert_close(gradient_pieces, gradient_whole, rtol=1e-6, atol=1e-9)


def test_A05_a_weighted_term_whose_input_is_missing_is_an_error() -> None:
    settings = Grpo(GrpoSettings(kl_coefficient=0.1)).loss(temperature=1.0)
    assert REFERENCE_LOGPROBS in settings.columns
    one = torch.zeros(1)
    inputs = LossInputs(
        logprobs=one,
        weights=one,
        sequence=torch.zeros(1, dtype=torch.int64),
        sequences=1,
        columns={ADVANTAGES: one, BEHAVIOUR_LOGPROBS: one, PROXIMAL_LOGPROBS: one},
    )
    with pytest.raises(ContractError, match="reference_logprobs"):
        policy_loss(inputs, **settings.settings)


def test_A06_a_shard_counts_by_its_tokens_and_an_empty_shard_by_nothing() -> None:
    batch = rows_of([3, 1, 0], [1, 0, 0], [0, 0, 0])
    grpo = Grpo(GrpoSettings())
    prepared = grpo.prepare(batch)
    denominators = np.asarray(prepared.columns[DENOMINATOR])
    weights = prepared.columns[LOSS_WEIGHTS]
    assert isinstance(weights, Ragged)
    mean = torch.tensor(2.0, requires_grad=True)
    numerator = supervised_numerator(mean.expand(3), weights[0][batch.ragged(LOSS_MASK)[0]])
    (numerator / denominators.sum()).backward()
    assert mean.grad is not None
    assert float(mean.grad) == 0.75
    empty = torch.zeros(0, requires_grad=True)
    output = call(grpo, batch, prepared, [torch.zeros(3), torch.zeros(1), empty], [2])
    output.numerator.backward()
    assert output.numerator.item() == 0.0
    assert output.metrics == {}


@pytest.mark.parametrize("sequences", [9, 2])
def test_A07_uneven_and_empty_ranks_sum_to_the_gradient_of_one_process(sequences: int) -> None:
    batch = rows_of(list(range(1, sequences + 1)), [i % 2 for i in range(sequences)], [0] * sequences)
    grpo = Grpo(GrpoSettings())
    prepared = grpo.prepare(batch)
    gradients = []
    for ranks in (1, 4):
        theta = torch.linspace(-2, -1, sequences, requires_grad=True)
        logprobs = [theta[i].expand(i + 1) for i in range(sequences)]
        for rank in range(ranks):
            call(grpo, batch, prepared, logprobs, range(rank, sequences, ranks)).numerator.backward()
        assert theta.grad is not None
        gradients.append(theta.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("aggregation", EXPECTED)
def test_A08_a_pad_row_without_trainable_tokens_has_no_weight_in_any_count(aggregation: str) -> None:
    real = rows_of([1, 1, 1], [1, 0, 0], [0, 0, 0])
    padded = rows_of([1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1], pad=1)
    settings = aggregation_settings(aggregation)
    plain, with_pad = prepare(real, **settings), prepare(padded, **settings)
    np.testing.assert_array_equal(with_pad.columns[DENOMINATOR], [*np.asarray(plain.columns[DENOMINATOR]), 0.0])
    assert not with_pad.trained[3]
    assert plain.metrics["reward/mean"].value == pytest.approx(1 / 3)


def test_A08_the_mean_over_uneven_ranks_is_the_mean_over_sequences() -> None:
    batch = rows_of([1, 1, 1], [1, 0, 0], [0, 0, 0])
    prepared = prepare(batch, aggregation="sequence_mean_token_mean")
    weights, denominators = prepared.columns[LOSS_WEIGHTS], np.asarray(prepared.columns[DENOMINATOR])
    assert isinstance(weights, Ragged)
    values = (1.0, 2.0, 6.0)
    ranks = ([0, 1], [2])
    numerator = sum(float(weights[i].sum()) * values[i] for rank in ranks for i in rank)
    assert numerator / sum(denominators[rank].sum() for rank in ranks) == pytest.approx(3.0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_A09_advantages_travel_with_the_row_through_any_micro_batch(size: int) -> None:
    batch = rows_of([1, 2, 3, 4, 2, 1, 2, 2], [1, 0, 0, 1, 0, 0, 0, 1], [5, 5, 5, 5, 3, 3, 3, 3])
    whole = prepare(batch).columns[ADVANTAGES]
    assert isinstance(whole, Ragged)
    expected = {int(row): whole[i].max(initial=0) + whole[i].min(initial=0) for i, row in enumerate(batch.rows)}
    order = np.random.default_rng(0).permutation(len(batch))
    shuffled = batch.take(order)
    ready = shuffled.with_columns(prepare(shuffled).columns)
    for start in range(0, len(batch), size):
        micro = ready.take(np.arange(start, min(start + size, len(batch))))
        for i, row in enumerate(micro.rows):
            mask, advantages = micro.ragged(LOSS_MASK)[i], micro.ragged(ADVANTAGES)[i]
            assert set(advantages[mask].tolist()) == {expected[int(row)]}
