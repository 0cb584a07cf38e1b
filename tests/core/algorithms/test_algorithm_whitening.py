"""Scaling over a whole batch: closed forms, what no order changes, and who must say that it compares groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.contract import AlgorithmNeeds
from headrace_algorithms.grpo import Grpo
from headrace_algorithms.variants import ReinforcePlusPlus, ReinforcePlusPlusBaseline, Rloo
from headrace_algorithms.whitening import Whitening, whitened

ONES = np.ones(3, dtype=np.int64)


@given(
    st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 5)), min_size=2, max_size=12),
    st.sampled_from(["scale", "shift_and_scale"]),
)
def test_a_value_counts_once_for_each_of_its_tokens(rows: list[tuple[float, int]], whitening: Whitening) -> None:
    values, tokens = np.array([v for v, _ in rows]), np.array([n for _, n in rows])
    each = whitened(np.repeat(values, tokens), np.ones(tokens.sum(), dtype=np.int64), whitening=whitening)
    found = np.repeat(whitened(values, tokens, whitening=whitening), tokens)
    np.testing.assert_allclose(found, each, rtol=1e-9, atol=1e-12)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12), st.randoms())
def test_no_order_changes_a_bit(values: list[float], random: Any) -> None:
    order = list(range(len(values)))
    random.shuffle(order)
    tokens = np.arange(1, len(values) + 1)
    straight = whitened(np.array(values), tokens, whitening="shift_and_scale")
    np.testing.assert_array_equal(
        whitened(np.array(values)[order], tokens[order], whitening="shift_and_scale"), straight[order]
    )


def test_a_whitened_batch_has_mean_0_and_deviation_1_over_its_tokens() -> None:
    found = whitened(np.array([3.0, -1.0, 0.5]), np.array([4, 1, 7]), whitening="shift_and_scale")
    each = np.repeat(found, [4, 1, 7])
    assert each.mean() == pytest.approx(0, abs=1e-12)
    assert each.std(ddof=1) == pytest.approx(1)


@pytest.mark.parametrize(("whitening", "expected"), [("scale", 0.3), ("shift_and_scale", 0.0)])
def test_values_equal_up_to_rounding_are_not_scaled_up(whitening: Whitening, expected: float) -> None:
    found = whitened(np.array([0.1 + 0.2, 0.3, 0.3]), ONES, whitening=whitening)
    np.testing.assert_allclose(found, [expected] * 3)


def test_without_a_group_a_lone_trajectory_learns_from_the_batch() -> None:
    assert ReinforcePlusPlus.needs(ReinforcePlusPlus.Settings()) == AlgorithmNeeds(
        min_group_size=1, whole_batch=True, proximal_logprobs=True
    )
    assert ReinforcePlusPlusBaseline.needs(ReinforcePlusPlusBaseline.Settings()).min_group_size == 2


def test_only_whitening_compares_groups() -> None:
    assert not Grpo.needs(Grpo.Settings()).whole_batch
    assert Rloo.needs(Rloo.Settings(whitening="scale")).whole_batch


def test_a_scale_of_what_is_not_compared_with_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="baseline = 'none' takes none"):
        Grpo.Settings(baseline="none")
