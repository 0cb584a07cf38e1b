"""Cases D: log-prob meaning and train-inference mismatch, as far as the algorithm and its loss decide them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.contract import Batch, LossInputs, Metric, Ragged, Sampling, merge_metrics
from headrace.contract.columns import (
    ADVANTAGES,
    BEHAVIOUR_LOGPROBS,
    GROUP,
    LOSS_MASK,
    LOSS_WEIGHTS,
    PROXIMAL_LOGPROBS,
    REWARD,
    TOKENS,
)
from headrace.errors import ConfigError, ContractError
from headrace_algorithms.grpo import Grpo
from headrace_algorithms.losses import policy_loss
from headrace_algorithms.settings import GrpoSettings

LOSSES = ("clipped", "decoupled", "importance")


def measure(
    current: Tensor, behaviour: Tensor, *, loss: str = "clipped", sequence: Tensor | None = None, parts: int = 1
) -> dict[str, float]:
    """Metrics of the loss over ``parts`` micro-batches, merged as a run merges them; the proximal policy is the
    current one."""
    settings: Any = Grpo(GrpoSettings(loss=loss)).loss(temperature=1.0).settings
    index = sequence if sequence is not None else torch.zeros(current.shape[0], dtype=torch.int64)
    merged = []
    for rows in torch.arange(int(index.max()) + 1).chunk(parts):
        chosen = torch.isin(index, rows)
        inputs = LossInputs(
            logprobs=current[chosen],
            weights=torch.ones(int(chosen.sum())),
            sequence=index[chosen] - rows[0],
            sequences=len(rows),
            columns={
                ADVANTAGES: torch.ones(int(chosen.sum())),
                BEHAVIOUR_LOGPROBS: behaviour[chosen],
                PROXIMAL_LOGPROBS: current[chosen],
            },
        )
        output = policy_loss(inputs, **settings)
        merged.append(
            {n: Metric(total=float(t), count=float(c), reduction=r) for n, (t, c, r) in output.metrics.items()}
        )
    return {name: m.value for name, m in merge_metrics(merged).items()}


def test_D01_truncated_sampling_cannot_be_asked_for() -> None:
    fields = {f.name for f in dataclasses.fields(Sampling)}
    assert not any(word in name for name in fields for word in ("top_p", "top_k", "min_p", "typical"))
    with pytest.raises(TypeError):
        Sampling(max_new_tokens=1, top_p=0.9)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_D02_a_temperature_that_is_not_positive_cannot_be_trained(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature") as caught:
        Grpo(GrpoSettings()).loss(temperature=temperature)
    assert caught.value.fix


def test_D02_the_ratio_is_one_when_both_sides_are_tempered_alike() -> None:
    spec = Grpo(GrpoSettings()).loss(temperature=0.5)
    assert spec.temperature == 0.5
    logits = torch.tensor([2.0, 0.0])
    tempered, raw = (logits / spec.temperature).log_softmax(0)[:1], logits.log_softmax(0)[:1]
    assert tempered.item() == pytest.approx(-0.018150, abs=1e-6)
    assert raw.item() == pytest.approx(-0.126928, abs=1e-6)
    assert measure(tempered, tempered)["policy/ratio_max"] == 1.0
    assert measure(raw, tempered)["policy/ratio_max"] == pytest.approx(0.8969, abs=1e-4)


def bigram_row() -> tuple[Batch, np.ndarray]:
    """A row of tokens 0, 1, 2, 0 under p(1|0) = .9, p(2|1) = .8, p(0|2) = .7, and its log-probs of this token."""
    table = np.array([[0.05, 0.9, 0.05], [0.1, 0.1, 0.8], [0.7, 0.2, 0.1]])
    tokens = np.array([0, 1, 2, 0], dtype=np.int32)
    logprobs = np.concatenate(([0.0], np.log(table[tokens[:-1], tokens[1:]]))).astype(np.float32)
    batch = Batch(
        rows=np.arange(2, dtype=np.int64),
        columns={
            TOKENS: Ragged.from_arrays([tokens, tokens]),
            LOSS_MASK: Ragged.from_arrays([np.array([False, True, True, True])] * 2),
            BEHAVIOUR_LOGPROBS: Ragged.from_arrays([logprobs, logprobs]),
            REWARD: np.array([1, 0], dtype=np.float32),
            GROUP: np.zeros(2, dtype=np.int64),
        },
    )
    return batch, logprobs


@pytest.mark.parametrize("loss", LOSSES)
def test_D03_on_policy_the_ratio_is_one_and_position_0_is_not_trained(loss: str) -> None:
    batch, logprobs = bigram_row()
    np.testing.assert_allclose(logprobs[1:], [-0.105361, -0.223144, -0.356675], atol=1e-6)
    weights = Grpo(GrpoSettings()).prepare(batch).columns[LOSS_WEIGHTS]
    assert isinstance(weights, Ragged)
    assert [w[0] for w in weights] == [0.0, 0.0]
    mask = batch.ragged(LOSS_MASK)[0]
    trained = torch.from_numpy(logprobs[mask])
    aligned = measure(trained, trained, loss=loss)
    assert abs(aligned["policy/ratio_max"] - 1) < 1e-5
    assert aligned["mismatch/abs_logprob_diff_max"] < 1e-5
    shifted = measure(trained, torch.from_numpy(np.roll(logprobs, 1)[mask]), loss=loss)
    assert shifted["mismatch/abs_logprob_diff_max"] > 0.1


def test_D03_a_mask_that_trains_position_0_is_refused() -> None:
    batch, _ = bigram_row()
    mask = batch.ragged(LOSS_MASK)
    broken = batch.with_columns({LOSS_MASK: mask.like(np.ones(len(mask.values), dtype=np.bool_))})
    with pytest.raises(ContractError, match="row 0 trains its first token"):
        Grpo(GrpoSettings()).prepare(broken)


@pytest.mark.parametrize("loss", LOSSES)
def test_D05_a_small_gap_per_token_is_reported_per_token_and_per_sequence(loss: str) -> None:
    behaviour = torch.linspace(-3, -0.1, 100)
    report = measure(behaviour + 0.012, behaviour, loss=loss)
    assert report["mismatch/abs_logprob_diff_mean"] == pytest.approx(0.012, rel=1e-4)
    assert report["mismatch/abs_logprob_diff_max"] == pytest.approx(0.012, rel=1e-4)
    assert report["mismatch/sequence_ratio_max"] == pytest.approx(3.3201, rel=1e-4)
    assert report["mismatch/ratio_max"] == pytest.approx(math.exp(0.012), rel=1e-6)
    assert report["mismatch/k3"] == pytest.approx(math.exp(0.012) - 1 - 0.012, rel=1e-3)
    assert report["mismatch/effective_sample_share"] == pytest.approx(1.0, rel=1e-6)
    assert report["mismatch/outside_share"] == 0.0


def test_D05_the_report_does_not_need_a_correction_to_be_on() -> None:
    report = measure(torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -1.0]), loss="clipped")
    assert report["mismatch/abs_logprob_diff_mean"] == pytest.approx(1.5)
    weights = [math.e, math.exp(-2)]
    share = sum(weights) ** 2 / (2 * sum(w * w for w in weights))
    assert report["mismatch/effective_sample_share"] == pytest.approx(share)
    assert report["mismatch/outside_share"] == 0.5


def test_D05_the_report_does_not_depend_on_the_split_into_micro_batches() -> None:
    generator = torch.Generator().manual_seed(2)
    sequence = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 1, 5, 2]))
    behaviour = -torch.rand(11, generator=generator)
    current = behaviour + 0.3 * torch.randn(11, generator=generator)
    whole = measure(current, behaviour, sequence=sequence)
    for parts in (2, 4):
        split = measure(current, behaviour, sequence=sequence, parts=parts)
        for name in whole.keys() - {"mismatch/effective_sample_share"}:
            assert split[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-7), name
