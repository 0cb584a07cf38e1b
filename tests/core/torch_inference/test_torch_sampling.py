"""Drawing tokens: the right distribution, the right log-prob, never an impossible token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.contract.columns import Array
from headrace_torch.decode.sampling import sample, streams, uniforms

BELOW_ONE = 1.0 - 2.0**-53


def draws(seed: int, count: int) -> Array:
    start = np.repeat(streams(np.array([seed], np.uint64)), count)
    return uniforms(start, np.arange(count))


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    seeds = np.array([3, 2**64 - 1, 0], np.uint64)
    together = uniforms(streams(seeds), np.array([5, 0, 7]))
    assert together.tolist() == [draws(3, 6)[5], draws(2**64 - 1, 1)[0], draws(0, 8)[7]]


def test_draws_are_uniform_and_neighbouring_seeds_are_unrelated() -> None:
    sample_size = 20000
    first, second = draws(1, sample_size), draws(2, sample_size)
    across = uniforms(streams(np.arange(sample_size, dtype=np.uint64)), np.zeros(sample_size, np.int64))
    for values in (first, second, across):
        counts = np.histogram(values, bins=20, range=(0, 1))[0]
        chi_square = float(((counts - sample_size / 20) ** 2 / (sample_size / 20)).sum())
        assert chi_square < 43.8  # 19 degrees of freedom: 0.1 % of uniform samples exceed it
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.03


@given(
    logits=st.lists(st.one_of(st.floats(-300, 300, width=32), st.just(-math.inf)), min_size=1, max_size=40).filter(
        lambda values: max(values) > -math.inf
    ),
    u=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 2.0**-53, 0.5, BELOW_ONE])),
    temperature=st.sampled_from([1.0, 0.1, 3.0]),
)
def test_a_token_of_probability_zero_is_never_drawn(logits: list[float], u: float, temperature: float) -> None:
    tokens, logprobs = sample(
        torch.tensor([logits]),
        u=torch.tensor([u], dtype=torch.float64),
        temperature=torch.tensor([[temperature]]),
        greedy=None,
    )
    assert math.exp(logprobs.item()) > 0
    assert logits[int(tokens)] > -math.inf


def test_sampled_frequencies_follow_the_tempered_distribution() -> None:
    count = 40000
    logits = torch.tensor([2.0, 0.0, 1.0, -math.inf]).expand(count, 4)
    tokens, logprobs = sample(
        logits, u=torch.from_numpy(draws(9, count)), temperature=torch.full((count, 1), 0.5), greedy=None
    )
    expected = torch.softmax(torch.tensor([4.0, 0.0, 2.0, -math.inf]), 0)
    found = torch.bincount(tokens, minlength=4) / count
    torch.testing.assert_close(found, expected, atol=0.01, rtol=0)
    torch.testing.assert_close(logprobs, expected.log()[tokens])


@pytest.mark.parametrize("u", [0.0, BELOW_ONE])
def test_greedy_rows_take_the_most_likely_token_and_leave_the_others_alone(u: float) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    tokens, logprobs = sample(
        logits,
        u=torch.full((2,), u, dtype=torch.float64),
        temperature=torch.tensor([[2.0], [1.0]]),
        greedy=torch.tensor([True, False]),
    )
    assert tokens.tolist() == [1, 0 if u == 0 else 2]
    assert logprobs[0].item() == pytest.approx(float(torch.log_softmax(logits[0] / 2, 0)[1]))


def test_a_distribution_that_is_not_finite_gives_a_log_prob_that_is_not_finite() -> None:
    logits = torch.tensor([[math.nan, 0.0], [math.inf, 0.0]])
    _, logprobs = sample(logits, u=torch.zeros(2, dtype=torch.float64), temperature=None, greedy=None)
    assert not torch.isfinite(logprobs).any()
