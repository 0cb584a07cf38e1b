"""The processes of ranks: how they are lost, and that nobody is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.contract import TrainingContext, TrainingStep
from headrace.errors import EngineError
from headrace.testing.suites.trainees import LIKELIHOOD, Trainee
from headrace_fsdp.training import FsdpTrainingEngine
from support.fsdp import others, started, wait_until_gone
from support.whole_runs import alive, descendants


def _train_on(trainee: Trainee, step: TrainingStep) -> None:
    while True:
        step.accumulate(trainee.batch())


@pytest.mark.parametrize("when", ["between orders", "in a step"])
def test_a_rank_that_is_killed_ends_the_engine_with_its_name(tiny_model: str, when: str) -> None:
    with started(tiny_model, ranks=2) as trainee:
        (lost,) = others(trainee.engine)
        step = trainee.engine.begin_step(LIKELIHOOD)
        os.kill(lost, signal.SIGKILL)
        if when == "between orders":
            wait_until_gone([lost])
        named = rf"rank 1 \(process {lost}\) was killed by SIGKILL"
        with pytest.raises(EngineError, match=named):
            _train_on(trainee, step)
        with pytest.raises(EngineError, match=named):
            trainee.weights()
        with pytest.raises(EngineError, match=named):
            step.discard()


def test_a_rank_that_is_stopped_ends_the_engine_after_the_deadline(tiny_model: str) -> None:
    with started(tiny_model, ranks=2, rank_deadline=2.0) as trainee:
        (stopped,) = others(trainee.engine)
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(EngineError, match=rf"rank 1 \(process {stopped}\) did not answer .*is stopped"):
            trainee.train(trainee.batch())


def test_nobody_is_left_when_the_model_cannot_be_loaded(tmp_path: Path) -> None:
    engine = FsdpTrainingEngine(FsdpTrainingEngine.Settings(ranks=2))
    context = TrainingContext(name="trainer", model_path=str(tmp_path), seed=0, threads=1, total_steps=1)
    before = descendants(os.getpid())
    with pytest.raises(EngineError, match=r"no readable config\.json"):
        engine.start(context)
    assert set(alive(descendants(os.getpid()))) <= set(before)


OWNER = """
import sys
from support.fsdp import others, started
with started(sys.argv[1], ranks=2) as trainee:
    print(*others(trainee.engine), flush=True)
    while True:
        trainee.train(trainee.batch())
"""


def test_no_rank_outlives_an_engine_that_is_killed(tiny_model: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, tiny_model],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert owner.stdout is not None
    ranks = [int(word) for word in owner.stdout.readline().split()]
    assert alive(ranks) == ranks
    owner.kill()
    owner.communicate()
    wait_until_gone(ranks)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 0}, "ranks must be at least 1"),
        ({"rank_deadline": 0.0}, "rank_deadline must be above 0"),
        ({"cpu_offload": True}, 'cpu_offload needs device = "cuda"'),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FsdpTrainingEngine.Settings(**settings)
