"""``[stages]``: where reference log-probs and advantages are computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli import main

APART = ("--set", "stages.processes=true")
REFERENCE = ("--set", "algorithm.reference_weight=0.1")
OWN_COLUMN = """
from headrace.contract import Algorithm, AlgorithmNeeds, LossSpec


class Own(Algorithm):
    @classmethod
    def needs(cls, settings):
        return AlgorithmNeeds()

    def prepare(self, batch):
        raise NotImplementedError

    def loss(self, *, temperature):
        return LossSpec(function="own:loss", columns=("advantages", "surprise"))
"""

WriteJob = Callable[..., Path]
ErrorsOf = Callable[..., list[str]]


def shown(job: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["graph", str(job), *options]) == 0
    return capsys.readouterr().out


def test_the_trainer_does_what_has_no_process_of_its_own(
    write_job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(write_job(), capsys, *REFERENCE)
    assert "also computes reference log-probs from the weights at the start of the phase, advantages" in text
    assert " stage " not in text.partition("phases")[0]


def test_stages_apart_are_processes_that_read_and_write_columns(
    write_job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    processes, _, phases = shown(write_job(), capsys, *REFERENCE, *APART).partition("phases")
    assert "1 x reference stage" in processes
    assert "storage unit       -> reference stage     tokens, loss_mask, group\n" in processes
    assert "reference stage    -> storage unit        reference_logprobs\n" in processes
    assert "advantage stage    -> storage unit        loss_weights, denominator, advantages, trained\n" in processes
    assert "also computes" not in phases


def test_an_algorithm_without_a_reference_has_no_stage_for_it(
    write_job: WriteJob, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(write_job(), capsys, *APART)
    assert "1 x advantage stage" in text
    assert "reference stage" not in text


def test_a_loss_that_reads_a_column_of_its_own_stays_in_the_trainer(write_job: WriteJob, errors_of: ErrorsOf) -> None:
    file = write_job().parent / "own.py"
    file.write_text(OWN_COLUMN)
    chosen = ('use = "', 'use = "')
    (error,) = errors_of(chosen, overrides=[f'algorithm={{use="{file}:Own"}}', "stages.processes=true"])
    assert "reads surprise, which only its own process could know" in error
    assert "stages.processes" in error
    assert "fix:  set stages.processes = false" in error
    assert errors_of(chosen, overrides=[f'algorithm={{use="{file}:Own"}}']) == []


@pytest.mark.parametrize("key", ["batch.streaming", "stages.processes"])
def test_an_algorithm_that_needs_the_whole_batch_is_refused_where_groups_come_one_by_one(
    errors_of: ErrorsOf, key: str
) -> None:
    whole = 'algorithm={use="reinforce_pp", loss="clipped"}'
    assert errors_of(overrides=[whole]) == []
    (error,) = errors_of(overrides=[whole, f"{key}=true"])
    assert "reinforce_pp compares the groups of a batch with one another" in error
    assert f"fix:  set {key} = false" in error
    assert errors_of(overrides=['algorithm={use="grpo", loss="clipped"}', f"{key}=true"]) == []


def test_an_algorithm_with_a_critic_asks_for_a_trainer_that_keeps_one(errors_of: ErrorsOf) -> None:
    critic = 'algorithm={use="ppo", loss="clipped", whitening="none"}'
    (error,) = errors_of(overrides=[critic])
    assert "ppo needs a critic, and training engine" in error
    assert "fix:  choose a training engine with values" in error
    for error in errors_of(overrides=[critic, "stages.processes=true"]):
        assert "needs a critic" in error or "fix:  set stages.processes = false" in error
    assert len(errors_of(overrides=[critic, "stages.processes=true"])) == 3
