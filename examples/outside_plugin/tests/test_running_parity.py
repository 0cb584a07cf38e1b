"""The environment keeps the rules of its role, and pays for what is right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from headrace_parity.environment import ParitySettings, RunningParity, running_parity
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from headrace.contract import Environment, EnvironmentContext, Episode
from headrace.errors import ConfigError
from headrace.testing.suites import EnvironmentContract


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    """A tokenizer of characters."""
    tokenizer = Tokenizer(models.WordLevel({token: n for n, token in enumerate(["<pad>", "<eos>", *"01="])}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return str(tmp_path)


class TestRunningParity(EnvironmentContract):
    @pytest.fixture
    def plugin(self) -> Environment:
        return RunningParity(ParitySettings())

    @pytest.fixture
    def model_path(self, model_path: str) -> str:
        return model_path


def test_the_parity_of_every_prefix() -> None:
    assert running_parity("0110") == "0100"


@pytest.mark.parametrize(
    ("change", "reward", "correct"), [(None, 1.0, True), (0, 0.0, False), (3, 0.5, False), (5, 5 / 6, False)]
)
def test_digits_before_the_first_wrong_one_are_paid_for(
    model_path: str, change: int | None, reward: float, correct: bool
) -> None:
    environment = RunningParity(ParitySettings(longest=6))
    environment.start(EnvironmentContext(model_path=model_path, seed=0, directory="."))
    task = environment.task(0, split="train")
    answer = list(task.data["answer"])
    if change is not None:
        answer[change] = "10"[int(answer[change])]
    score = environment.score(task, _episode("".join(answer)))
    assert score.correct == correct
    assert score.reward == pytest.approx(reward)


def _episode(text: str) -> Episode:
    none = np.zeros(1)
    return Episode(
        tokens=none.astype(np.int32),
        loss_mask=none.astype(bool),
        logprobs=none.astype(np.float32),
        spans=(),
        finish_reason="stop",
        text=text,
    )


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    environment = RunningParity(ParitySettings())
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        environment.start(EnvironmentContext(model_path=str(tmp_path), seed=0, directory="."))
