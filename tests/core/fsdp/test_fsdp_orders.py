"""What two ranks are told and refuse together, and that they go on after it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from headrace.contract import LossInputs, LossOutput, LossSpec
from headrace.errors import ConfigError, ContractError, EngineError
from headrace.testing.suites.trainees import LIKELIHOOD, Trainee, rows_of
from headrace_torch.ranks.leader import deal
from support.fsdp import started


def picky(inputs: LossInputs) -> LossOutput:
    """Raises where there is a row of 17 tokens, which is on one rank."""
    if inputs.sequence.bincount().max() == 16:
        raise ZeroDivisionError("a long row")
    return LossOutput(numerator=-(inputs.weights * inputs.logprobs).sum())


PICKY = LossSpec(function=f"{__name__}:picky")


@pytest.fixture(scope="module")
def two(tiny_model: str) -> Iterator[Trainee]:
    """Two ranks that whatever is refused must leave usable."""
    with started(tiny_model, ranks=2) as trainee:
        yield trainee


def test_rows_are_dealt_by_their_tokens() -> None:
    batch = rows_of([[0] * length for length in (5, 1, 4, 2)], prompt=1)
    assert [batch.take(share).ragged("tokens").lengths.sum() for share in deal(batch, (0, 1))] == [6, 6]


def test_a_rank_without_rows_computes_along(two: Trainee) -> None:
    batch = two.batch()
    alone = two.engine.forward(batch.take([3]))["logprobs"].values
    assert np.allclose(alone, two.engine.forward(batch)["logprobs"][3], atol=1e-5)
    assert two.train(batch.take([3])).applied
    assert len(two.engine.forward(batch.take([]))["logprobs"]) == 0


def test_a_loss_that_raises_on_one_rank_is_raised_and_the_ranks_go_on(two: Trainee) -> None:
    batch = two.batch()
    step = two.engine.begin_step(PICKY)
    with pytest.raises((ZeroDivisionError, EngineError), match="a long row"):
        step.accumulate(batch)
    step.discard()
    expected = two.train(batch, denominator=0.0).metrics
    step = two.engine.begin_step(PICKY)
    step.accumulate(batch.take([0, 1]))
    step.discard()
    assert two.train(batch, denominator=0.0).metrics == expected


def test_what_a_batch_lacks_is_said_by_name_and_the_ranks_go_on(two: Trainee) -> None:
    unknown = rows_of([[0, 1], [0, two.vocabulary]], prompt=1)
    with pytest.raises(ContractError, match=f"token id {two.vocabulary}"):
        two.engine.forward(unknown)
    with pytest.raises(ContractError, match="keeps no critic"):
        two.engine.forward(two.batch(), outputs=("values",))
    step = two.engine.begin_step(LossSpec(function=LIKELIHOOD.function, columns=("absent",)))
    with pytest.raises(ContractError, match="needs column 'absent'"):
        step.accumulate(two.batch())
    step.discard()
    with pytest.raises(ContractError, match="cannot be imported"):
        two.engine.begin_step(LossSpec(function="no.such.module:loss"))
    with pytest.raises(ContractError, match="cannot be sent to other ranks"):
        two.engine.begin_step(LossSpec(function=LIKELIHOOD.function, settings={"odd": object()}))
    with pytest.raises(ConfigError, match="temperature"):
        two.engine.forward(two.batch(), temperature=0.0)
    with pytest.raises(ValueError, match="no snapshot 'never'"):
        two.engine.forward(two.batch(), weights="never")
    assert two.train(two.batch()).applied


def test_a_second_engine_in_a_process_is_refused(two: Trainee, tiny_model: str) -> None:
    with (
        pytest.raises(EngineError, match=r"in a process group of torch\.distributed already"),
        started(tiny_model, ranks=1),
    ):
        pass
    assert two.train(two.batch()).applied
