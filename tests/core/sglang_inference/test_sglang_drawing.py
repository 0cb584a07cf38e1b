"""Draws that SGLang's processes make by seed and position."""

from __future__ import annotations

import torch

from headrace_sglang.drawing import draw, uniform

VOCABULARY = 5
LOGITS = torch.tensor([0.0, 1.0, -1.0, 0.5, float("-inf")])


def drawn(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    logprobs = torch.log_softmax(LOGITS, dim=-1).expand(len(seeds), VOCABULARY)
    return draw(logprobs, seeds, positions)


def test_shares_of_draws_are_the_probabilities() -> None:
    count = 40_000
    for seeds, positions in (
        (torch.arange(count), torch.zeros(count, dtype=torch.int64)),
        (torch.full((count,), 2**62 + 3), torch.arange(count)),
    ):
        shares = torch.bincount(drawn(seeds, positions), minlength=VOCABULARY) / count
        torch.testing.assert_close(shares, torch.softmax(LOGITS, dim=-1), atol=0.01, rtol=0.0)
        assert shares[4] == 0


def test_a_draw_follows_from_seed_and_position_alone() -> None:
    seeds, positions = torch.tensor([7, 8, 7, 7]), torch.tensor([3, 3, 3, 4])
    values = uniform(seeds, positions)
    assert values[0] == values[2]
    assert len(set(values.tolist())) == 3
    assert torch.equal(uniform(seeds[2:], positions[2:]), values[2:])


def test_numbers_are_those_of_the_published_generator() -> None:
    """SplitMix64 seeded with 0 begins with 0xe220a8397b1dcdaf; here it is the state that positions are added to."""
    first = 0xE220A8397B1DCDAF
    mixed, mask = (first + 0x9E3779B97F4A7C15) % 2**64, 2**64 - 1
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    mixed ^= mixed >> 31
    found = uniform(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert found.item() == (mixed >> 11) / 2**53


def test_draws_are_tokens_at_both_ends() -> None:
    certain = torch.full((1, 3), float("-inf"))
    for token in range(3):
        logprobs = certain.clone()
        logprobs[0, token] = 0.0
        many = torch.arange(1000)
        assert set(draw(logprobs.expand(1000, 3), many, many).tolist()) == {token}
