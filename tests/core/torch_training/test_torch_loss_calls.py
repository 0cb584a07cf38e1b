"""A loss gets what it asked for, about trainable tokens only, and is refused by name when it breaks its contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace.contract import Batch, LossInputs, LossSpec, Ragged
from headrace.contract.columns import LOSS_MASK, LOSS_WEIGHTS, TOKENS
from headrace.errors import ContractError
from headrace_algorithms.variants import Tbpo
from headrace_torch.trainer.losses import Loss
from headrace_torch.trainer.packing import make_plan

NAME = "losses_of_torch_training_tests"


def inputs_of(batch: Batch, spec: LossSpec) -> LossInputs:
    plan = make_plan(batch, vocabulary=64)
    assert plan is not None
    logprobs = torch.zeros(len(plan.trainable), requires_grad=True)
    loss = Loss(spec)
    return loss.inputs(batch, plan, loss.columns(batch, plan), {"logprobs": logprobs})


def test_a_loss_gets_trainable_tokens_only_in_the_rows_order(rows: Any, spec: Any) -> None:
    batch = rows([[1, 5, 6, 7], [1, 8], [1, 9, 4]], prompt=2)
    batch = batch.with_columns(
        {
            "advantages": batch.ragged(TOKENS).like(np.arange(9, dtype=np.float32)),
            "reward": np.array([0.5, 1.5, 2.5], dtype=np.float32),
        }
    )
    inputs = inputs_of(batch, spec(columns=("advantages", "reward")))
    assert inputs.sequences == 3
    assert inputs.sequence.tolist() == [0, 0, 2]
    assert inputs.columns["advantages"].tolist() == [2.0, 3.0, 8.0]
    assert inputs.columns["reward"].tolist() == [0.5, 1.5, 2.5]
    assert inputs.weights.tolist() == [1.0, 1.0, 1.0]
    assert inputs.weights.dtype == torch.float32
    assert inputs.sequence.dtype == torch.int64


def test_read_only_columns_from_a_message_are_fine(rows: Any, spec: Any) -> None:
    batch = rows([[1, 5, 6], [1, 8]])
    reward = np.array([0.5, 1.5], dtype=np.float32)
    frozen = batch.with_columns({"reward": reward})
    for column in frozen.columns.values():
        (column.values if isinstance(column, Ragged) else column).flags.writeable = False
    assert inputs_of(frozen, spec(columns=("reward",))).columns["reward"].tolist() == [0.5, 1.5]


@pytest.mark.parametrize("missing", ["advantages", LOSS_WEIGHTS])
def test_an_absent_column_is_refused_by_function_and_column(missing: str, engine: Any, batch: Any, spec: Any) -> None:
    rows = batch([3, 4])
    rows = Batch(rows=rows.rows, columns={n: c for n, c in rows.columns.items() if n != missing})
    step = engine().begin_step(spec("valued", columns=("advantages",) if missing == "advantages" else ()))
    with pytest.raises(ContractError, match=f"loss {NAME}:valued needs column '{missing}'"):
        step.accumulate(rows)


def test_an_undeclared_column_is_refused_by_function_and_column(engine: Any, batch: Any, spec: Any) -> None:
    with pytest.raises(ContractError, match=f"loss {NAME}:undeclared reads column 'reward'"):
        engine().begin_step(spec("undeclared")).accumulate(batch([3, 4], reward=np.zeros(2)))


def test_a_misaligned_column_is_refused(engine: Any, batch: Any, spec: Any) -> None:
    rows = batch([3, 4], value=Ragged.from_arrays([np.zeros(4), np.zeros(3)]))
    with pytest.raises(ContractError, match=r"column 'value' of loss .*valued is not aligned"):
        engine().begin_step(spec("valued", columns=("value",))).accumulate(rows)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("spread", r"returned a numerator of shape \(5,\), expected a scalar"),
        ("constant", "returned a numerator without gradient"),
        ("bare", "returned Tensor, expected a LossOutput"),
        ("odd_metric", "returned metric 'odd' as .*median"),
    ],
)
def test_an_answer_that_is_no_sum_is_refused_by_function(
    function: str, message: str, engine: Any, batch: Any, spec: Any
) -> None:
    step = engine().begin_step(spec(function))
    with pytest.raises(ContractError, match=f"loss {NAME}:{function} {message}"):
        step.accumulate(batch([3, 4]))


@pytest.mark.parametrize("name", ["no_such_module_at_all:loss", f"{NAME}:no_such_loss", "math", ":loss", "math:pi"])
def test_a_loss_that_cannot_be_found_is_refused_before_the_step(name: str, engine: Any) -> None:
    with pytest.raises(ContractError, match=f"loss '{name}'"):
        engine().begin_step(LossSpec(function=name))


def test_nothing_outside_the_mask_reaches_a_loss(engine: Any, rows: Any, spec: Any, gradient: Any) -> None:
    """Values outside the mask, and tokens after the last trained one, change no bit of the gradient."""
    clean = rows([[1, 5, 6, 7, 8], [1, 8, 9]], prompt=2)
    mask = clean.ragged(LOSS_MASK).like(np.array([0, 0, 1, 1, 0, 0, 0, 1], dtype=bool))
    clean = clean.with_columns({LOSS_MASK: mask})
    tokens = clean.ragged(TOKENS)
    other = tokens.like(np.where(np.arange(8) == 4, 11, tokens.values))
    dirty = clean.with_columns({LOSS_WEIGHTS: tokens.like(np.where(mask.values, 1.0, np.nan)), TOKENS: other})
    one = engine()
    assert np.array_equal(gradient(one, spec(), [clean]), gradient(one, spec(), [dirty]))


def test_QRL_10_what_stands_outside_the_mask_reaches_neither_ratio_nor_weight_nor_loss(
    engine: Any, batch: Any, train: Any
) -> None:
    """Of a prompt, and of what a tool said in the middle of an answer."""
    rows = batch([6, 9, 4], prompt=2)
    mask = rows.ragged(LOSS_MASK).values.copy()
    mask[4] = False
    rows = rows.with_columns({LOSS_MASK: rows.ragged(TOKENS).like(mask)})
    tbpo, found = Tbpo(Tbpo.Settings()).loss(temperature=1.0), []
    for outside in (0.0, float("nan"), 1e6):
        trainer = engine()
        columns = {
            name: rows.ragged(TOKENS).like(np.where(mask, inside, outside).astype(np.float32))
            for name, inside in zip((*tbpo.columns, LOSS_WEIGHTS), (-1.0, -3.0, -2.9, 0.2), strict=True)
        }
        result = train(trainer, tbpo, rows.with_columns(columns))
        assert result.applied
        found.append((result.loss, result.gradient_norm, result.metrics))
    assert found[0] == found[1] == found[2]
