"""The plugin classes ``grpo`` and ``supervised``: needs, settings, prepared columns."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import pytest

from headrace.contract import AlgorithmNeeds, Batch, Ragged
from headrace.contract.columns import (
    ADVANTAGES,
    DENOMINATOR,
    GROUP,
    LOSS_MASK,
    LOSS_WEIGHTS,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    REWARD,
    TRUNCATED,
)
from headrace.errors import ContractError
from headrace_algorithms.grpo import Grpo
from headrace_algorithms.settings import GrpoSettings
from headrace_algorithms.supervised import Supervised


def rows_of(rewards: list[float], *, groups: list[int] | None = None, lengths: list[int] | None = None) -> Batch:
    masks = [np.array([False, False] + [True] * n) for n in (lengths or [2] * len(rewards))]
    return Batch(
        rows=np.arange(len(rewards), dtype=np.int64),
        columns={
            LOSS_MASK: Ragged.from_arrays(masks, dtype=np.bool_),
            REWARD: np.array(rewards, dtype=np.float32),
            GROUP: np.array(groups if groups is not None else [0] * len(rewards), dtype=np.int64),
        },
    )


def test_both_are_found_by_entry_point() -> None:
    found = {e.name: e.load() for e in entry_points(group="headrace.algorithm")}
    assert found["grpo"] is Grpo
    assert found["supervised"] is Supervised


def test_importing_and_constructing_the_plugins_leaves_torch_alone() -> None:
    program = (
        "import sys; from headrace_algorithms.grpo import Grpo; from headrace_algorithms.supervised import Supervised;"
        "Grpo(Grpo.Settings()).loss(temperature=1.0); Supervised(Supervised.Settings()).loss(temperature=1.0);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("loss", ["clipped", "decoupled", "importance"])
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_the_columns_a_loss_reads_are_those_its_needs_announce(loss: Any, kl: float) -> None:
    settings = GrpoSettings(loss=loss, kl_coefficient=kl)
    needs, spec = Grpo.needs(settings), Grpo(settings).loss(temperature=1.0)
    assert needs.proximal_logprobs == (loss == "decoupled") == (PROXIMAL_LOGPROBS in spec.columns)
    assert needs.reference_logprobs == (kl > 0) == (REFERENCE_LOGPROBS in spec.columns)
    assert needs.rollout
    assert needs.min_group_size == 2


def test_entropy_is_computed_only_when_it_is_reported_or_in_the_loss() -> None:
    assert Grpo(GrpoSettings()).loss(temperature=1.0).entropy
    assert not Grpo(GrpoSettings(report_entropy=False)).loss(temperature=1.0).entropy
    assert Grpo(GrpoSettings(report_entropy=False, entropy_coefficient=0.1)).loss(temperature=1.0).entropy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_low": 1.0}, "clip_low = 1.0 is out of bounds"),
        ({"clip_high": -0.1}, "clip_high = -0.1 is out of bounds"),
        ({"kl_coefficient": float("nan")}, "kl_coefficient = nan is out of bounds"),
        ({"importance_cap": float("nan")}, "importance_cap = nan is out of bounds"),
        ({"aggregation": "constant"}, "needs a positive constant_length"),
        ({"aggregation": "constant", "constant_length": 0.0}, "needs a positive constant_length"),
        ({"constant_length": 8.0}, "does nothing under aggregation 'token_mean'"),
        ({"keep_level": "sequence_geometric"}, "has no bound to leave tokens out by"),
    ],
)
def test_a_setting_that_could_not_act_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GrpoSettings(**settings)


def test_prepared_columns_have_the_dtypes_and_offsets_of_the_contract() -> None:
    batch = rows_of([1, 0, 1], lengths=[3, 0, 5])
    for plugin in (Grpo(GrpoSettings()), Supervised(Supervised.Settings())):
        prepared = plugin.prepare(batch)
        assert prepared.trained.dtype == np.bool_
        assert np.asarray(prepared.columns[DENOMINATOR]).dtype == np.float64
        for name in {ADVANTAGES, LOSS_WEIGHTS} & prepared.columns.keys():
            column = prepared.columns[name]
            assert isinstance(column, Ragged)
            assert column.values.dtype == np.float32
            np.testing.assert_array_equal(column.offsets, batch.ragged(LOSS_MASK).offsets)


def test_rows_without_a_gradient_are_not_trained_and_still_counted() -> None:
    prepared = Grpo(GrpoSettings()).prepare(rows_of([1, 1, 0, 1], groups=[0, 0, 1, 1]))
    assert prepared.trained.tolist() == [False, False, True, True]
    assert np.asarray(prepared.columns[DENOMINATOR]).tolist() == [2, 2, 2, 2]


def test_an_empty_response_is_not_trained_and_not_counted_but_its_reward_is() -> None:
    prepared = Grpo(GrpoSettings(advantage_scaling="none")).prepare(rows_of([1, 0], lengths=[0, 2]))
    assert prepared.trained.tolist() == [False, True]
    assert np.asarray(prepared.columns[DENOMINATOR]).tolist() == [0, 2]
    advantages = prepared.columns[ADVANTAGES]
    assert isinstance(advantages, Ragged)
    assert advantages[1].tolist() == [0, 0, -0.5, -0.5]
    assert prepared.metrics["response/empty_share"].value == 0.5


def test_masking_truncated_rows_without_knowing_them_is_an_error() -> None:
    with pytest.raises(ContractError, match=TRUNCATED):
        Grpo(GrpoSettings(mask_truncated=True)).prepare(rows_of([1, 0]))


def test_an_empty_batch_prepares_to_nothing() -> None:
    prepared = Grpo(GrpoSettings()).prepare(rows_of([]))
    assert len(prepared.trained) == 0
    assert prepared.metrics == {}


def test_supervised_needs_no_rollout_no_reward_and_no_group_of_two() -> None:
    needs = Supervised.needs(Supervised.Settings())
    assert needs == AlgorithmNeeds(rollout=False, behaviour_logprobs=False, min_group_size=1)
    batch = rows_of([float("nan")] * 3, groups=[0, 1, 2], lengths=[2, 0, 3])
    prepared = Supervised(Supervised.Settings()).prepare(batch)
    assert prepared.trained.tolist() == [True, False, True]
    assert np.asarray(prepared.columns[DENOMINATOR]).tolist() == [2, 0, 3]
    weights = prepared.columns[LOSS_WEIGHTS]
    assert isinstance(weights, Ragged)
    np.testing.assert_array_equal(weights.values, batch.ragged(LOSS_MASK).values.astype(np.float32))
