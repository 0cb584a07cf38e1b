"""What Megatron's ranks refuse together, and how they end. Run by ``make test-engines``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.contract import LossInputs, LossOutput, LossSpec
from headrace.errors import ContractError, EngineError
from headrace.testing.suites.trainees import LIKELIHOOD, VALUED, Trainee, rows_of
from support.fsdp import wait_until_gone, write_model
from support.megatron import LAYOUTS, others, started

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


def picky(inputs: LossInputs) -> LossOutput:
    """Raises where there is a row of 17 tokens, which is in one micro-batch of one share."""
    if inputs.sequence.bincount().max() == 16:
        raise ZeroDivisionError("a long row")
    return LossOutput(numerator=-(inputs.weights * inputs.logprobs).sum())


PICKY = LossSpec(function=f"{__name__}:picky")


@pytest.fixture(scope="module", params=["dp2", "pp2"])
def two(request: pytest.FixtureRequest, tiny_model: str) -> Iterator[Trainee]:
    """Two ranks that whatever is refused must leave usable."""
    with started(tiny_model, LAYOUTS[request.param], learning_rate=1e-3) as trainee:
        yield trainee


def test_a_loss_that_raises_inside_the_schedule_is_raised_and_the_ranks_go_on(two: Trainee) -> None:
    step = two.engine.begin_step(PICKY)
    with pytest.raises((ZeroDivisionError, EngineError), match="a long row"):
        step.accumulate(two.batch())
    with pytest.raises(ContractError, match="lost a part of a batch"):
        step.finish(denominator=1.0)
    step.discard()
    before = two.weights()
    assert all((two.weights()[name] == array).all() for name, array in before.items())
    assert two.train(two.batch()).applied


def test_what_a_batch_lacks_is_said_by_name_and_the_ranks_go_on(two: Trainee) -> None:
    unknown = rows_of([[0, 1], [0, two.vocabulary]], prompt=1)
    with pytest.raises(ContractError, match=f"token id {two.vocabulary}"):
        two.engine.forward(unknown)
    with pytest.raises(ContractError, match="keeps no critic"):
        two.engine.forward(two.batch(), outputs=("values",))
    with pytest.raises(ContractError, match="keeps no critic"):
        two.engine.begin_step(VALUED)
    step = two.engine.begin_step(LossSpec(function=LIKELIHOOD.function, columns=("absent",)))
    with pytest.raises(ContractError, match="needs column 'absent'"):
        step.accumulate(two.batch())
    step.discard()
    assert two.train(two.batch().take([3])).applied


def test_a_rank_that_is_killed_ends_the_engine_by_its_name_and_leaves_none(tiny_model: str) -> None:
    with started(tiny_model, LAYOUTS["tp2"]) as trainee:
        (rank,) = others(trainee.engine)
        os.kill(rank, signal.SIGKILL)
        wait_until_gone([rank])
        with pytest.raises(EngineError, match=rf"rank 1 \(process {rank}\) was killed by SIGKILL"):
            trainee.train(trainee.batch())


def test_a_model_that_cannot_be_cut_so_is_refused_with_a_divisor(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", layers=3)
    with (
        pytest.raises(EngineError, match="3 layers cannot be shared equally by pipeline_parallel = 2"),
        started(path, LAYOUTS["pp2"]),
    ):
        pass


def test_the_stand_in_is_in_megatron_s_modules_alone() -> None:
    from headrace_megatron import engine, network  # where Megatron is: the module is read wherever tests are chosen

    assert (engine.parallel_state.torch is torch) == torch.cuda.is_available()
    assert network.torch is torch
    assert torch.cuda.current_device.__module__ == "torch.cuda"
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_where_there_is_a_gpu_nothing_is_replaced() -> None:
    told = "import torch; torch.cuda.is_available = lambda: True; from headrace_megatron import engine; "
    subprocess.run([sys.executable, "-c", f"{told} assert engine.parallel_state.torch is torch"], check=True)
