"""What is told of the distance between trainer and rollout, token by token and by the length of answers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.contract import Metric, merge_metrics
from headrace_algorithms.mismatch import IMPROBABLE, LENGTHS, PROBABLE, TAIL, mismatch_metrics


def measured(log_ratio: Tensor, behaviour: Tensor, sequence: Tensor) -> dict[str, Metric]:
    found = mismatch_metrics(log_ratio, behaviour, sequence, int(sequence.max()) + 1)
    return {n: Metric(total=float(t), count=float(c), reduction=r) for n, (t, c, r) in found.items()}


def test_tokens_beyond_what_a_clip_lets_through_are_of_the_tail() -> None:
    log_ratio = torch.tensor([0.0, TAIL, TAIL + 0.01, -TAIL - 0.01])
    found = measured(log_ratio, torch.zeros(4), torch.zeros(4, dtype=torch.int64))
    assert found["mismatch/tail_share"].value == 0.5


def test_an_error_token_is_probable_where_it_was_sampled_and_improbable_for_the_trainer() -> None:
    behaviour = torch.tensor([PROBABLE, PROBABLE, PROBABLE - 1, IMPROBABLE - 1])
    trainer = torch.tensor([IMPROBABLE, IMPROBABLE + 0.1, IMPROBABLE, IMPROBABLE])
    found = measured(trainer - behaviour, behaviour, torch.zeros(4, dtype=torch.int64))
    assert found["mismatch/error_token_share"].value == 0.25


def test_a_gap_that_is_the_same_for_every_token_adds_up_over_longer_answers() -> None:
    lengths = torch.tensor([3, 20, 300, 2000, 15])
    sequence = torch.repeat_interleave(torch.arange(5), lengths)
    log_ratio = torch.full((int(lengths.sum()),), -0.01)
    found = measured(log_ratio, torch.zeros_like(log_ratio), sequence)
    sums = [found[f"mismatch/sequence_log_ratio_from_{least}"].value for least in LENGTHS]
    assert sums == pytest.approx([0.09, 0.2, 3.0, 20.0], rel=1e-4)
    for least in LENGTHS:
        assert found[f"mismatch/abs_logprob_diff_mean_from_{least}"].value == pytest.approx(0.01, rel=1e-4)


def test_what_is_told_by_length_does_not_depend_on_how_answers_are_split_into_micro_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 20, 100, 17, 5])
    sequence = torch.repeat_interleave(torch.arange(5), lengths)
    log_ratio = torch.randn(int(lengths.sum()), generator=generator)
    together = measured(log_ratio, torch.zeros_like(log_ratio), sequence)
    parts = [sequence < 2, sequence >= 2]
    apart = merge_metrics(
        measured(log_ratio[part], torch.zeros(int(part.sum())), sequence[part] - sequence[part].min()) for part in parts
    )
    by_length = {name for name in together if "_from_" in name}
    assert len(by_length) == 4
    assert by_length == {name for name in apart if "_from_" in name}
    for name in by_length:
        assert apart[name].value == pytest.approx(together[name].value, rel=1e-5)


def test_a_token_that_is_not_finite_is_told_of_among_answers_of_its_length_only() -> None:
    sequence = torch.repeat_interleave(torch.arange(2), torch.tensor([3, 20]))
    log_ratio = torch.zeros(23)
    log_ratio[5] = float("nan")
    found = measured(log_ratio, torch.zeros(23), sequence)
    assert found["mismatch/abs_logprob_diff_mean_from_1"].value == 0
    assert (
        found["mismatch/abs_logprob_diff_mean_from_16"].value != found["mismatch/abs_logprob_diff_mean_from_16"].value
    )
