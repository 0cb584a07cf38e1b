"""The stages of a phase follow from what its algorithm declares."""

from __future__ import annotations

from itertools import product

import pytest

from headrace.contract import AlgorithmNeeds
from headrace.flow.stages import Stage, flowing, stages_of

EVERY_NEEDS = [
    AlgorithmNeeds(
        rollout=rollout,
        behaviour_logprobs=behaviour,
        proximal_logprobs=proximal,
        reference_logprobs=frozen,
        values=values,
        turn_rewards=turns,
        greedy_reward=greedy,
    )
    for rollout, behaviour, proximal, frozen, values, turns, greedy in product((True, False), repeat=7)
]


def stage(needs: AlgorithmNeeds, name: str) -> Stage:
    return next(stage for stage in stages_of(needs) if stage.name == name)


@pytest.mark.parametrize("needs", EVERY_NEEDS, ids=str)
def test_every_column_has_one_writer_and_is_read_after_it_is_written(needs: AlgorithmNeeds) -> None:
    written: list[str] = []
    for each in stages_of(needs):
        assert set(each.reads) <= set(written), each.name
        written += each.writes
    assert len(set(written)) == len(written)


@pytest.mark.parametrize("needs", EVERY_NEEDS, ids=str)
def test_the_last_stage_trains_on_every_column(needs: AlgorithmNeeds) -> None:
    *before, last = stages_of(needs)
    assert last == Stage("train", tuple(column for each in before for column in each.writes), ())


def test_an_algorithm_gets_only_the_stages_it_declares() -> None:
    names = [each.name for each in stages_of(AlgorithmNeeds())]
    assert names == ["generate", "score", "advantage", "train"]
    everything = AlgorithmNeeds(proximal_logprobs=True, reference_logprobs=True, values=True)
    names = [each.name for each in stages_of(everything)]
    assert names == ["generate", "score", "reference", "value", "advantage", "proximal", "train"]


def test_reference_log_probs_wait_for_no_reward() -> None:
    frozen = stage(AlgorithmNeeds(reference_logprobs=True), "reference")
    assert frozen == Stage("reference", ("tokens", "loss_mask", "group"), ("reference_logprobs",), by_row=True)


def test_proximal_log_probs_are_for_rows_that_are_trained() -> None:
    proximal = stage(AlgorithmNeeds(proximal_logprobs=True), "proximal")
    assert proximal == Stage("proximal", ("tokens", "loss_mask", "trained"), ("proximal_logprobs",))


def test_advantages_are_compared_with_values_where_there_is_a_critic() -> None:
    assert stage(AlgorithmNeeds(values=True), "value") == Stage("value", ("tokens", "loss_mask"), ("values",))
    assert "values" in stage(AlgorithmNeeds(values=True), "advantage").reads
    assert "values" not in stage(AlgorithmNeeds(), "advantage").reads


def test_demonstrations_have_no_log_probs_and_no_advantages() -> None:
    first, *_ = stages = stages_of(AlgorithmNeeds(rollout=False, behaviour_logprobs=False))
    assert first == Stage("demonstrate", (), ("tokens", "loss_mask", "group", "version", "truncated"))
    assert not {"behaviour_logprobs", "advantages"} & set(stages[-1].reads)


def test_a_version_for_each_token_is_made_where_trajectories_are_interrupted() -> None:
    for stages in (stages_of(AlgorithmNeeds()), stages_of(AlgorithmNeeds(rollout=False), interrupts=True)):
        assert not any("token_versions" in stage.writes for stage in stages)
    edges = flowing(stages_of(AlgorithmNeeds(), interrupts=True))
    read_by = [edge.target for edge in edges if "token_versions" in edge.columns and edge.source == "generate"]
    assert read_by == ["advantage", "train"]


def test_columns_flow_from_their_writer_to_every_stage_that_reads_them() -> None:
    edges = {(e.source, e.target): e.columns for e in flowing(stages_of(AlgorithmNeeds(reference_logprobs=True)))}
    made = ("tokens", "loss_mask", "behaviour_logprobs", "group", "version", "truncated")
    assert edges == {
        ("generate", "score"): ("tokens", "loss_mask", "truncated"),
        ("generate", "reference"): ("tokens", "loss_mask", "group"),
        ("generate", "advantage"): made,
        ("generate", "train"): made,
        ("score", "advantage"): ("reward",),
        ("score", "train"): ("reward",),
        ("reference", "train"): ("reference_logprobs",),
        ("advantage", "train"): ("loss_weights", "denominator", "advantages", "trained"),
    }
