"""Response lengths: what can be written for them, and that a trajectory's follows from seed and id."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigError, RunError
from headrace.simulate.lengths import Bimodal, Constant, LogNormal, Trajectories, parse_lengths


def parsed(text: str, directory: Path = Path()) -> object:
    return parse_lengths(text, origin="--lengths", directory=directory)


def test_every_distribution_can_be_written() -> None:
    assert parsed("constant:tokens=800") == Constant(tokens=800)
    assert parsed("lognormal:median=1300,sigma=1,cap=30000") == LogNormal(median=1300, sigma=1, cap=30000)
    assert parsed("bimodal:short=5, long=80, share=0.1") == Bimodal(short=5, long=80, share=0.1)


def test_a_file_of_numbers_is_drawn_from(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("3, 5\n8")
    drawn = Trajectories(parse_lengths("lengths.txt", origin="", directory=tmp_path), seed=0, most=100)
    assert {drawn.tokens(trajectory) for trajectory in range(200)} == {3, 5, 8}
    assert drawn.longest == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lognorml:median=3", "Did you mean 'lognormal'"),
        ("lognormal:median=3", "sigma is missing"),
        ("constant:tokens=3,cap=5", "unknown key 'cap'"),
        ("constant:tokens=many", "'tokens=many' is not KEY=NUMBER with a number above 0"),
        ("constant:tokens=-1", "is not KEY=NUMBER with a number above 0"),
        ("bimodal:short=1,long=2,share=3", "share is a probability, 0 to 1, got 3"),
    ],
)
def test_a_wrong_distribution_is_taught(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    assert message in caught.value.message
    assert caught.value.origin == "--lengths"
    assert caught.value.fix


@pytest.mark.parametrize("content", ["", "three", "1 0 2", "inf"])
def test_a_file_without_lengths_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "lengths.txt").write_text(content)
    with pytest.raises(RunError, match="holds no lengths"):
        parsed("lengths.txt", tmp_path)


def test_a_length_follows_from_the_seed_and_the_id_in_whatever_order_it_is_asked_for() -> None:
    lengths = LogNormal(median=100, sigma=1)
    forwards, backwards, other = (Trajectories(lengths, seed=seed, most=10**6) for seed in (1, 1, 2))
    ids = range(0, 20_000, 37)
    expected = [forwards.tokens(i) for i in ids]
    assert [backwards.tokens(i) for i in reversed(ids)] == expected[::-1]
    assert [other.tokens(i) for i in ids] != expected
    assert [forwards.apart("held-out").tokens(i) for i in ids] != expected


def test_lengths_are_those_of_the_distribution_cut_at_what_the_job_allows() -> None:
    drawn = Trajectories(LogNormal(median=1000, sigma=1), seed=0, most=5000)
    tokens = np.array([drawn.tokens(i) for i in range(20_000)])
    assert np.median(tokens) == pytest.approx(1000, rel=0.05)
    assert tokens.max() == 5000
    assert np.mean(tokens < 1000 * np.e) == pytest.approx(0.841, abs=0.01)
