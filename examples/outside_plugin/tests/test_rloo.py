"""The algorithm keeps the rules of its role, and computes what its formula says."""

from __future__ import annotations

import numpy as np
import pytest
from headrace_parity.rloo import Rloo, RlooSettings, advantages, capped_policy_gradient

from headrace.contract import Algorithm, LossInputs
from headrace.testing import PerToken
from headrace.testing.suites import AlgorithmContract


class TestRloo(AlgorithmContract):
    @pytest.fixture
    def plugin(self) -> Algorithm:
        return Rloo(RlooSettings())


def test_each_reward_is_compared_with_the_mean_of_the_others() -> None:
    found = advantages(np.array([1.0, 0.0, 0.5, np.nan]), np.zeros(4), order=np.arange(4))
    assert found.tolist() == [0.75, -0.75, 0.0, 0.0]


def test_a_ratio_beyond_the_cap_counts_for_the_cap() -> None:
    current = PerToken.of(np.log(np.array([0.5, 0.5])))
    behaviour = {"behaviour_logprobs": np.log(np.array([0.5, 0.1]))}
    output = capped_policy_gradient(
        LossInputs(logprobs=current, weights=np.ones(2), sequence=np.arange(2), sequences=2, columns=behaviour),
        cap=2.0,
    )
    assert float(output.numerator) == pytest.approx((1.0 + 2.0) * np.log(2))
    assert output.numerator.gradient.tolist() == pytest.approx([-1.0, -2.0])
