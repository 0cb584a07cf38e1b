"""A critic beside the policy: it starts at 0, learns with it, is saved with it, and is published with nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.contract import Ragged
from headrace.contract.columns import LOSS_MASK, TOKENS
from headrace.errors import ContractError, RunError

LENGTHS = [5, 9, 3, 9]


def with_goals(rows: Any) -> Any:
    """Goals that depend on the token: a critic can learn them."""
    tokens = rows.ragged(TOKENS)
    return rows.with_columns({"goal": tokens.like((tokens.values % 3).astype(np.float32))})


def values_of(engine: Any, rows: Any, **options: Any) -> Ragged:
    found: Ragged = engine.forward(rows, outputs=("values",), **options)["values"]
    return found


@pytest.fixture
def regress(spec: Any) -> Any:
    return spec("regressed", columns=("goal",), values=True)


def test_values_are_0_before_any_training_and_outside_the_mask_ever(
    engine: Any, batch: Any, regress: Any, train: Any
) -> None:
    critic, rows = engine(values=True), with_goals(batch(LENGTHS))
    assert not values_of(critic, rows).values.any()
    train(critic, regress, rows)
    found, mask = values_of(critic, rows).values, rows.ragged(LOSS_MASK).values
    assert found.dtype == np.float32
    assert found[mask].all()
    assert not found[~mask].any()


def test_a_critic_learns_its_goals(engine: Any, batch: Any, regress: Any, train: Any) -> None:
    critic, rows = engine(values=True), with_goals(batch(LENGTHS))
    losses = [train(critic, regress, rows).loss for _ in range(40)]
    assert losses[-1] < 0.1 * losses[0]


def test_a_row_s_values_do_not_depend_on_its_neighbours(engine: Any, batch: Any, regress: Any, train: Any) -> None:
    critic, rows = engine(values=True), with_goals(batch(LENGTHS))
    train(critic, regress, rows)
    together = values_of(critic, rows)
    for row in range(len(rows)):
        np.testing.assert_allclose(values_of(critic, rows.take([row])).values, together[row], atol=1e-5)


def test_a_value_is_of_the_tokens_before_it(engine: Any, batch: Any, rows: Any, regress: Any, train: Any) -> None:
    critic = engine(values=True)
    train(critic, regress, with_goals(batch(LENGTHS)))
    one, other = (values_of(critic, rows([[1, 5, 6, last]])).values for last in (7, 8))
    np.testing.assert_array_equal(one, other)
    assert values_of(critic, rows([[1, 5, 9, 7]])).values[2] == one[2]
    assert values_of(critic, rows([[1, 5, 9, 7]])).values[3] != one[3]


def test_the_gradient_does_not_depend_on_the_split(
    engine: Any, batch: Any, regress: Any, train: Any, gradient: Any
) -> None:
    critic, rows = engine(values=True), with_goals(batch(LENGTHS))
    train(critic, regress, rows)
    whole = gradient(critic, regress, [rows])
    for split in ([[0], [1], [2], [3]], [[3, 1], [2, 0]]):
        parts = gradient(critic, regress, [rows.take(part) for part in split])
        np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-6)


def test_values_of_a_snapshot_stay_what_they_were(engine: Any, batch: Any, regress: Any, train: Any) -> None:
    critic, rows = engine(values=True), with_goals(batch(LENGTHS))
    train(critic, regress, rows)
    before = values_of(critic, rows).values
    critic.snapshot("before")
    train(critic, regress, rows)
    np.testing.assert_array_equal(values_of(critic, rows, weights="before").values, before)
    assert not np.array_equal(values_of(critic, rows).values, before)


def test_log_probs_are_those_of_an_engine_without_a_critic(engine: Any, batch: Any) -> None:
    rows = batch(LENGTHS)
    found = [engine(values=values).forward(rows)["logprobs"].values for values in (True, False)]
    np.testing.assert_array_equal(*found)


def test_a_critic_is_neither_published_nor_exported(
    engine: Any, batch: Any, regress: Any, train: Any, tmp_path: Path
) -> None:
    critic = engine(values=True)
    train(critic, regress, with_goals(batch(LENGTHS)))
    plain = {name for name, _ in engine().weight_source().tensors()}
    assert {name for name, _ in critic.weight_source().tensors()} == plain
    critic.save(str(tmp_path / "export"), kind="export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert not [name for name in exported if "critic" in name]
    engine(str(tmp_path / "export"))


def test_a_save_of_an_engine_without_a_critic_is_refused_by_one_that_has_it(engine: Any, tmp_path: Path) -> None:
    engine().save(str(tmp_path / "save"), kind="resume")
    with pytest.raises(RunError, match=r"critic\.bias is missing"):
        engine(values=True).load(str(tmp_path / "save"))


def test_values_asked_of_an_engine_without_a_critic_are_refused(engine: Any, batch: Any, regress: Any) -> None:
    plain, rows = engine(), with_goals(batch(LENGTHS))
    with pytest.raises(ContractError, match="keeps no critic"):
        values_of(plain, rows)
    with pytest.raises(ContractError, match="keeps no critic"):
        plain.begin_step(regress).accumulate(rows)


def test_the_critic_s_error_shapes_the_hidden_states_that_it_reads(
    engine: Any, batch: Any, regress: Any, train: Any, gradient: Any
) -> None:
    critic, rows = engine(values=True), with_goals(batch(LENGTHS))
    train(critic, regress, rows)
    goal = rows.ragged("goal")
    own = sum(tensor.numel() for tensor in critic._started._updater.parameters.network.critic.parameters())
    found = [
        gradient(critic, regress, [rows.with_columns({"goal": goal.like(goal.values + shift)})])[:-own]
        for shift in (np.float32(0), np.float32(1))
    ]
    assert not np.array_equal(*found)
